"""The threads that compute and wait, so that the event loop does neither."""
