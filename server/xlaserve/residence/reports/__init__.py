"""Status, history and readings of models, added up over processes."""
