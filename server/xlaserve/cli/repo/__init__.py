"""`xlaserve repo`: commands that inspect or change a model repository."""
