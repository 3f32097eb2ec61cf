"""Sources of weights and adapters: validated folders below allowed roots, or folders fetched from the object store."""
