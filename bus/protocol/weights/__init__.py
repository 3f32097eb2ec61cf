"""Versions of weights: the changes of each tensor, the chain of versions, and the versions that are kept."""
