"""The tests of rollbus; `tests/support` holds what several of them share."""
