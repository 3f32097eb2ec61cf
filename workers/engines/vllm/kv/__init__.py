"""Transfer of KV from a prefill worker's engine to a decode worker's engine with vLLM's KV connectors."""
