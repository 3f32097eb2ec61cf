"""The order of requests: pulls of a worker, assignment to prefill workers, and suspects after an engine death."""
