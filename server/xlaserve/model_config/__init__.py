"""The configuration of a model: its formats, its fields, and their effects."""
