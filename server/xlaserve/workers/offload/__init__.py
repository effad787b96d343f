"""Workers that execute batches for one another while they are idle."""
