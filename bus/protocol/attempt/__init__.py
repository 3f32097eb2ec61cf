"""The attempts of one child request at its client."""
