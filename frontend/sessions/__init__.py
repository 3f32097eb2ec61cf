"""Sessions of agents: a tree of served turns with the tokens that were sampled. Decisions only, without I/O."""
