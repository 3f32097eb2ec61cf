"""vLLM as a worker's engine. Importing this imports neither vllm nor torch; starting the engine does."""

from workers.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
