"""The durable queue of requests: its `streams` in JetStream, the client's `publisher`, the worker's `puller`."""
