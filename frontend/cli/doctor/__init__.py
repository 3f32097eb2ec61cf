"""The checks of `rollbus doctor`: `machine` (this machine and the connection) and `server` (NATS and the fleet)."""
