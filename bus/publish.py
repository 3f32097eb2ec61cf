"""The publisher of weights: it reads a trainer's tensors, finds the changes, and stores them for the workers."""
