"""Checkpoints and adapters in NATS's object store, in the layout of `nats object`.

A folder is stored as the objects `<prefix>/<path of the file>` of a bucket. Its source is written `<bucket>/<prefix>`.
"""
