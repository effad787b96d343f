"""`xlaserve init`: creates a repository to start with."""
