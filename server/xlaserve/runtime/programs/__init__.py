"""Compiled programs: their keys, their caches, who compiles and who shares them."""
