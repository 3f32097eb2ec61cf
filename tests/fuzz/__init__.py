"""Fuzz tests of decoders and their callers: invalid input causes an error of rollbus and uses bounded memory."""
