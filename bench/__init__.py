"""Benchmarks: each prints its command, the machine and what it measured. Run from a checkout, not installed."""
