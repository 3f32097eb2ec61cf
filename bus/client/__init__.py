"""The client that trainers use. It has two sides, on two threads.

In the caller's loop: `client` (the methods), `desk` (opens calls and hands them over), `calls` (a request until its
caller has its result), `fleet`, `generation`. On the bus thread (`loop_thread`), which no blocked caller holds up:
`traffic` (puts the parts together), `exchange` (what becomes of each request) with its `children`, `dispatch` (how
requests get out) with `sessions`, `links` (what comes back), `fleet_watch` (who lives).
"""
