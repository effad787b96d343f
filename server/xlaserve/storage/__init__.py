"""Models in remote stores: listed, fetched into a bounded cache, and checked."""
