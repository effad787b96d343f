"""Tools that need no server: plan, warm, check and compare models."""
