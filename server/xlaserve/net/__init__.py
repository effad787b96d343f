"""Protocol-independent networking: accepting, TLS, memory accounting, compression, statuses."""
