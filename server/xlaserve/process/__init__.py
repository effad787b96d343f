"""The process itself: its log, signals, files, memory, and what starts and replaces it."""
