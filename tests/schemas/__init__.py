"""What the wire promises: round trips, hostile bytes, error texts, golden bytes and the tables of docs/wire.md."""
