"""Observability of requests: logs, traces, spans, failures."""
