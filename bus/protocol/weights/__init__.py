"""Versions of weights: what changed in each tensor, how versions build on each other, and which of them are kept."""
