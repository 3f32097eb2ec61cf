"""The control plane on the bus: the desired states in NATS, and commands with their acks."""
