"""Language models: exported programs, and the slots in which their requests are generated."""
