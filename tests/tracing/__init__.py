"""Tests of spans."""
