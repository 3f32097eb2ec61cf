"""vLLM as a worker's engine. Importing this imports neither vllm nor torch; starting the engine does."""
