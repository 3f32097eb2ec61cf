"""The `rollbus` command line, and text to token ids."""
