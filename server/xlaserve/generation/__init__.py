"""Text generation: exported language models, and slots for concurrent requests."""
