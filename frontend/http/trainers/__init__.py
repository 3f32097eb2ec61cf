"""Routes of the inference servers of single trainers."""
