"""Work stealing: idle workers execute batches of busy ones."""
