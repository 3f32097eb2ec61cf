"""Shared test support: fixtures, fakes and a real NATS server."""
