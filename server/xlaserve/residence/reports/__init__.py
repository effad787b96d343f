"""Status, history and reports of models, merged over the processes of a server."""
