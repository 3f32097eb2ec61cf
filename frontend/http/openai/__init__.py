"""Routes of the OpenAI API, with the extensions of vLLM and Dynamo."""
