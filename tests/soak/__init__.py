"""Soak runs: load and faults for a long time.

Memory and file descriptors of surviving processes must stay constant.
"""
