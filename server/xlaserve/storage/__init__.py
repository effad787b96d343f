"""Models in a store that is not a disk: listed, fetched into a bounded cache, and checked."""
