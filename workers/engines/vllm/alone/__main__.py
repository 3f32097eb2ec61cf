"""Runs vLLM alone."""

from . import main

main()
