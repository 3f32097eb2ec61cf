"""The HTTP service: existing clients of vLLM, OpenAI and Dynamo in front of the same fleet.

It holds no state of its own: any number of them can run side by side.
"""
