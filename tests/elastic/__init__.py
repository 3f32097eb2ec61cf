"""Elastic runs: workers join, leave, are killed and are replaced while requests, deltas and commands flow."""
