"""The acceptance table of docs/reliability.md: what is done, the criterion, and the figure."""
