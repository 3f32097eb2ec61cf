"""A worker's state, incarnation and lease, and the guard of its id."""
