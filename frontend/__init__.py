"""The `rollbus` command line, the HTTP service, and the tokenizer that both use."""
