"""The publisher of weights: reads a trainer's tensors, finds what changed in them, and stores that for the workers."""
