"""The path of a request through a worker: from the queue into the engine, and from engine steps to frames."""
