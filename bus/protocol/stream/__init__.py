"""The chunks of one request: how a worker writes them, and how a client checks and joins them."""
