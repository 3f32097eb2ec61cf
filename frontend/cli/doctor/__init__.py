"""What `rollbus doctor` looks at: `machine` (this process and its machine), `bus` (the NATS server and the fleet)."""
