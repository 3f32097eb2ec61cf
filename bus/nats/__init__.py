"""The connection to NATS: nats-py's client with a transport of our own, JetStream's API, an embedded server."""
