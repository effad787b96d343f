"""Model repositories in stores: listed, prepared for a load, and fetched for it."""
