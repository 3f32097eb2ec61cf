"""Users of a NATS server: their keys and certificates, and the subjects that each role may use. No I/O but files."""
