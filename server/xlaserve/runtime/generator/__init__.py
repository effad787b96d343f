"""What is known of a language model before it generates: interface, sizes, counts."""
