"""Access control: the rules file, tokens, quotas, and the permission gate's check."""
