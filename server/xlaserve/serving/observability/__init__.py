"""Observability: access log, traces, spans, events, and failure counts."""
