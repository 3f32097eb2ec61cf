"""Live view of the fleet: the history and the event stream for viewers. See docs/http.md, "Watching the fleet"."""
