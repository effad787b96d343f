"""Permissions of callers: rules of one file, tokens, quotas, and the check of the gate."""
