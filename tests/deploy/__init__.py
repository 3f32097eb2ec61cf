"""Tests of deploy: what its scripts, units and charts run."""
