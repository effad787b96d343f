"""Language models: exported programs, and slots for concurrent requests."""
