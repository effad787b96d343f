"""What authors hand to servers: manifest, computation, weights and signature."""
