"""The client that trainers use. It has two sides, on two threads.

In the caller's loop: `client` (the methods), `call_registry` (opens calls and passes them on), `calls` (a request until
its caller has its result), `fleet`, `generation`. On the bus thread (`loop_thread`), which no blocked caller holds up:
`runtime` (connects the parts), `exchange` (the attempts of each request) with its `children`, `dispatch` (publishes
requests) with `placement` (at which worker), `links` (receives frames), `presence_watcher` (the live workers).
"""
