"""The wire format byte by byte: golden messages, whose encoding never changes within a wire version."""
