"""Published agents, unchanged, on the ordinary routes of the HTTP service."""
