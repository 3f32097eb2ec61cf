"""The sessions of agents over HTTP: routes, running turns, and the bucket that keeps the closed ones."""
