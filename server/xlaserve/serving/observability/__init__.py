"""What is seen of requests: logs, traces, spans, failures."""
