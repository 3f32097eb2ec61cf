"""OpenAI's routes, with the extensions of vLLM and Dynamo."""
