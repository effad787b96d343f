"""Language models before they generate: interface, sizes, counters."""
