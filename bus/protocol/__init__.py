"""The protocol as plain objects: no asyncio, no nats. The code around them only carries bytes."""
