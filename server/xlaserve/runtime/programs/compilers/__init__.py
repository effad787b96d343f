"""Programs of loads, compiled in processes of their own: the server only deserializes them."""
