"""Bytes and messages made to break decoders and what follows them: an error of ours, and bounded memory."""
