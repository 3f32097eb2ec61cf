"""The fleet in a terminal, as `rollbus top` shows it."""
