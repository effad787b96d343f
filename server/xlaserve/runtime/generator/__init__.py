"""Facts about a language model before it generates: interface, sizes, counts."""
