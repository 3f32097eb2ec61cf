"""rllm-model-gateway, OpenRLHF and AReaL, unchanged, on the HTTP service or the bus with real vLLM workers."""
