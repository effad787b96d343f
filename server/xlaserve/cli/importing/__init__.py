"""`xlaserve import`: converts models of other frameworks."""
