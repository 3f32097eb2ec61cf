"""The wire, byte by byte: messages whose encoding never changes within a wire version."""
