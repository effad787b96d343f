"""Models that can be called: recognised, loaded, compiled, executed."""
