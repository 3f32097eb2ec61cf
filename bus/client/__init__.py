"""The client for trainers. It runs on two threads.

The methods of `Client` and `Fleet` and the results belong to the caller's event loop. The connection, the open requests
and the presence of workers belong to the bus thread (`LoopThread`), which a blocked caller does not delay. The public
names are in `rollbus` and `rollbus.sync`.
"""
