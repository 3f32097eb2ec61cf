"""The order of requests: what a worker pulls, which prefill worker gets which, and which may have killed an engine."""
