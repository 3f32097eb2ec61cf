"""What a worker does with commands: it brings itself to what is desired, and says how that went."""
