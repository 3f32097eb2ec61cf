"""Chaos runs: many requests through a fleet whose workers and server are repeatedly killed, frozen and restarted."""
