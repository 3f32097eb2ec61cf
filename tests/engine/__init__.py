"""Tests of the vLLM engine, on the real one."""
