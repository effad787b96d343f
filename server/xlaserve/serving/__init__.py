"""The serving of requests: admitted, checked, queued, executed and counted."""
