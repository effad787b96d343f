"""`xlaserve init`: makes a repository to begin with."""
