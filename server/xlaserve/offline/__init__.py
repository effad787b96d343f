"""What is done with models without a server: plan, warm, check, compare."""
