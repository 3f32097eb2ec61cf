"""What becomes of one child request at its client."""
