"""Worker processes. Each worker runs one engine."""
