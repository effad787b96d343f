"""Language models: interface, sizes and counters; the package `generation` runs them."""
