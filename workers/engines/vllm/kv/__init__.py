"""KV that one engine computes and another one uses: vLLM's KV connectors, as prefill and decode workers need them."""
