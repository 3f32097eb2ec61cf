"""Tests of the wire format: round trips, hostile bytes, error texts, golden bytes and the tables of docs/wire.md."""
