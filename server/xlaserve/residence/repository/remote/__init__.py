"""Model repositories in object stores: listing, preparation and fetching."""
