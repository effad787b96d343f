"""Tools that need no running server: plan, warm, check and compare models."""
