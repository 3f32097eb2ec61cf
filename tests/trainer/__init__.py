"""What a training process relies on: nothing lost, shifted, narrowed or padded unseen between the bus and a loss."""
