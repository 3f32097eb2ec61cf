"""What the service keeps and streams for people who watch the fleet: see docs/http.md, "Watching the fleet"."""
