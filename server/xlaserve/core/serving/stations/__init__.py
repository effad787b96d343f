"""How loaded instances work: a station for each, of a kind of the table."""
