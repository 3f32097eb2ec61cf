"""Tests of the training side: no entry is lost, shifted, narrowed or replaced by padding between the bus and a loss."""
