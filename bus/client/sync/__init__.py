"""The client without asyncio. `owner_thread` runs a client's event loop on a thread; `client` has the blocking methods.

The public names are in `rollbus.sync`.
"""
