"""The protocol as plain objects without asyncio and nats. The code around these objects only carries bytes."""
