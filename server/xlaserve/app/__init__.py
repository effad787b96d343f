"""The composition root: builds everything, starts what serves, and drains it."""
