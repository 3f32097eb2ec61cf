"""The client for trainers. Its parts run on two threads.

In the caller's event loop: `client` (the public methods), `call_registry` (opens calls and submits them to the bus
thread), `calls` (a request until its caller has read the result), `fleet`, `generation`.

On the bus thread (`loop_thread`), which a blocked caller does not delay: `runtime` (connects the parts), `exchange`
(the attempts of each request) with its `children`, `dispatch` (publishes requests) with `placement` (chooses the
worker), `links` (receives frames), `presence_watcher` (tracks the live workers).

TODO sync: The client without asyncio. `owner_thread` runs a client's event loop on a thread; `client` has the blocking methods.

The public names are in `rollbus.sync`.
"""
