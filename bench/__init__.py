"""Benchmarks. Each prints its command, the machine and its figures. They run from a checkout and are not installed."""
