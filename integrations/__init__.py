"""Parts that plug into published trainers. Each imports its trainer; nothing else of rollbus imports it."""
