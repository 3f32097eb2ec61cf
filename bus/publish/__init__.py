"""Publishing of weights: drafts of tensors, stored versions, and the updates that load them.

From the caller inwards:

- `WeightPublisher` is what a training program uses. It blocks the caller's thread, which draws the tensors.
- `VersionPublisher` runs on the bus thread: it chooses delta or anchor, stores the objects, and updates the fleet.
- `Draft` compares, encodes and packs the tensors of one publication; `TensorFeed` moves them between the threads.
- `VersionChain` holds the lease of a model, and changes its chain record.
- `Publication` stores the objects and the manifest of one version together with the other ranks, and commits it.
- `ChainKey` reads and writes the chain record in the bucket.
"""
