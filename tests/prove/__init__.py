"""Tests of `rollbus prove`."""
