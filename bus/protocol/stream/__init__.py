"""The chunks of one request: how a worker writes them, and how a client verifies and joins them."""
