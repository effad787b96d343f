"""`xlaserve serve`: its options, settings files and start."""
