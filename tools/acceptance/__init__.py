"""The acceptance table of docs/measurements/reliability.md: tests, criteria and figures."""
