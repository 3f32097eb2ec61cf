"""The client without asyncio. Its methods have the names of the methods of `rollbus.connect`, and block.

Any thread may use a connected client:

    with rollbus.sync.connect("nats://127.0.0.1:4222") as rb:
        generation = rb.complete(rollbus.GenerateRequest(prompt_token_ids=[1, 2, 3]))
        for generation in rb.complete_many(requests):
            ...
        rb.fleet.update_weights("/checkpoints/step-7", version=7)
"""

from .bus.client.sync import BlockingClient, BlockingFleet, BlockingGroups, connect

__all__ = ["BlockingClient", "BlockingFleet", "BlockingGroups", "connect"]
