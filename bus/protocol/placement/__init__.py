"""Which worker a request goes to directly, and which requests go to the queue."""
