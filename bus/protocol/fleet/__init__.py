"""The workers of a fleet: presence and leases, the desired state, the acks of commands, and canaries."""
