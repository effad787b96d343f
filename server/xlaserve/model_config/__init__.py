"""The configuration of a model: its forms, its fields, and what each asks for."""
