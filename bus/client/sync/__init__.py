"""The client without asyncio: `owner_thread` runs a client's own loop on a thread, `client` has the names that block.

What is public of it is `rollbus.sync`.
"""
