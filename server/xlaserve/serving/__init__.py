"""Request serving: admission, validation, queueing, execution and statistics."""
