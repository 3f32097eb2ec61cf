"""Commands at a worker: it reconciles itself with the desired state and publishes command acks."""
