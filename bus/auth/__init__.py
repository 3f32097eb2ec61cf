"""Users of a NATS server: their keys and certificates, and the subjects of each role. The only I/O is on files."""
