"""The APIs of agents, OpenAI's Responses and Anthropic's Messages, as translations of the chat route.

`responses.py` and `messages.py` translate a request to that of the chat route, and `response_items.py` and
`message_blocks.py` translate an answer. They do no I/O and do not know where an answer comes from. `routes.py` connects
them to the chat route.
"""
