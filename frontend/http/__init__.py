"""The HTTP service: it serves existing clients of vLLM, OpenAI and Dynamo from the same fleet.

The service stores no state of its own. Any number of instances can run side by side.
"""
