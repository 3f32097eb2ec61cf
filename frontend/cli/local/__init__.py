"""The processes of `rollbus up` and `rollbus frontend` on this machine."""
