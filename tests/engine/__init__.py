"""Tests of the vLLM engine with real engines."""
