"""`xlaserve repo`: looks after the models of a repository."""
