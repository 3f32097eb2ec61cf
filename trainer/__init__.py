"""What a training process does with routed experts: stitching, packing, replay. Needs no NATS."""
