"""How requests are answered: admitted, checked, queued, executed and counted."""
