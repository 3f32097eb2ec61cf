"""What several tests share: fixtures, fakes, a real NATS server."""
