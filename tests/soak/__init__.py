"""Load and faults for long, while memory and file descriptors of all that lives throughout stay flat."""
