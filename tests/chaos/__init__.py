"""Many requests through a fleet whose workers and server are killed, stopped and restarted all the time."""
