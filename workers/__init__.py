"""The processes that run engines: one worker, one engine."""
