"""The contract with vLLM: what the adapter uses of it, and whether the sources of a release have it."""
