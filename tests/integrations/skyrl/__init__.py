"""Tests of SkyRL 0.4, in the environment of `make test-skyrl`."""
