"""Python models whose code runs in processes of their own."""
