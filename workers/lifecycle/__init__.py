"""A worker's state, incarnation and lease, and the detection of another worker with the same id."""
