"""Decides which worker gets a request directly, and which requests go to the queue."""
