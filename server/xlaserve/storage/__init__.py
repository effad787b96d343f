"""Models in remote stores: listing, a bounded cache of fetched files, integrity checks."""
