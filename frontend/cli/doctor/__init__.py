"""The checks of `rollbus doctor`: `host_probe` (this process and its machine) and `bus` (the NATS server and fleet)."""
