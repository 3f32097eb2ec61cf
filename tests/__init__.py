"""The tests of rollbus; `tests/support` has the code that several tests share."""
