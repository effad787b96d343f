"""What each family of operations does to rows."""
