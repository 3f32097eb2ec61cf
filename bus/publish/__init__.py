"""Publishing of weights: drafts of tensors, stored versions, and the updates that load them."""
