"""The workers of a fleet: presence and leases, the desired state, command acks, and canaries."""
