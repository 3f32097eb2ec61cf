"""The connection to NATS: nats-py's client with rollbus's own transport, JetStream's API, and an embedded server."""
