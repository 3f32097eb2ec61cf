# mypy: ignore-errors
"""Run one published agent several times, each until it ends, and print the calls of its tool and its answers.

    python harness.py AGENT MODEL RUNS

AGENT is a function of this module. RUNS is JSON: a list of `[API, URL, KEY]`. API is `chat`, `responses` or `messages`,
with `-stream` for streams.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": tempfile.mkdtemp(),
}

TASK = "Add 1 five times, beginning with 0, and tell me the sum."
STEPS = 8
"""Limit on turns."""
CALLS: list[list[int]] = []


def key() -> str:
    """Return the key of the present run."""
    return os.environ["OPENAI_API_KEY"]


def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: the first one.
        b: the second one.
    """
    CALLS.append([a, b])
    return str(a + b)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def openai_sdk(api: str, url: str, model: str) -> str:
    """Loop over OpenAI's client as its documentation shows."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    if api.startswith("chat"):
        return chat_of_openai(client, model, stream=api.endswith("-stream"))
    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(STEPS):
        if api.endswith("-stream"):
            with client.responses.stream(model=model, input=items, tools=tools) as stream:
                stream.until_done()
                response = stream.get_final_response()
        else:
            response = client.responses.create(model=model, input=items, tools=tools)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = add(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return "no end"


def chat_of_openai(client: Any, model: str, *, stream: bool) -> str:
    """Loop over the chat API of OpenAI's client."""
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    history: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(STEPS):
        if stream:
            with client.chat.completions.stream(model=model, messages=history, tools=tools) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=model, messages=history, tools=tools).choices[0].message
        history.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no end"


def anthropic_sdk(api: str, url: str, model: str) -> str:
    """Run the tool runner of Anthropic's client."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, max_retries=0)
    tool = anthropic.beta_tool(add)
    stream = api.endswith("-stream")
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=200,
        tools=[tool],
        messages=[{"role": "user", "content": TASK}],
        stream=stream,
    )
    message: Any = None
    for turn in runner:
        message = turn.get_final_message() if stream else turn
    return "".join(block.text for block in message.content if block.type == "text")


def openai_agents(api: str, url: str, model: str) -> str:
    """Run an agent of openai-agents."""
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if api.startswith("chat") else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="adder",
        instructions="Use the tool.",
        model=kind(model=model, openai_client=client),
        tools=[agents.function_tool(add)],
    )

    async def run() -> str:
        if not api.endswith("-stream"):
            return str((await agents.Runner.run(agent, TASK, max_turns=STEPS)).final_output)
        result = agents.Runner.run_streamed(agent, TASK, max_turns=STEPS)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    return asyncio.run(run())


def pydantic_ai(api: str, url: str, model: str) -> str:
    """Run an agent of pydantic-ai."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    chosen: Any
    if api.startswith("messages"):
        chosen = AnthropicModel(model, provider=AnthropicProvider(api_key=key(), base_url=url))
    else:
        provider = OpenAIProvider(api_key=key(), base_url=f"{url}/v1")
        chosen = (OpenAIChatModel if api.startswith("chat") else OpenAIResponsesModel)(model, provider=provider)
    agent = Agent(chosen, instructions="Use the tool.", tools=[add], model_settings={"max_tokens": 200})
    if not api.endswith("-stream"):
        return str(agent.run_sync(TASK).output)

    async def run() -> str:
        async with agent.iter(TASK) as steps:
            async for step in steps:
                if Agent.is_model_request_node(step):
                    async with step.stream(steps.ctx) as stream:
                        async for _ in stream:
                            pass
        return str(steps.result.output) if steps.result else "no end"

    return asyncio.run(run())


def litellm(api: str, url: str, model: str) -> str:
    """Loop over litellm in the format of chats, which it translates to the other APIs itself."""
    import litellm as lite

    tools = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": SCHEMA}}]
    of_api = {
        "chat": ("openai", f"{url}/v1"),
        "responses": ("openai/responses", f"{url}/v1"),
        "messages": ("anthropic", url),
    }
    provider, base = of_api[api.removesuffix("-stream")]
    history: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(STEPS):
        given: Any = {"model": f"{provider}/{model}", "messages": history, "tools": tools, "max_tokens": 200}
        stream = api.endswith("-stream")
        answer: Any = lite.completion(**given, api_base=base, api_key=key(), num_retries=0, stream=stream)
        if stream:
            answer = lite.stream_chunk_builder(list(answer), messages=history)
        message = answer.choices[0].message
        history.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "no end"


def smolagents(api: str, url: str, model: str) -> str:
    """Run the agent of smolagents that calls tools. It ends with the tool `final_answer`."""
    import smolagents as smol

    chosen = smol.OpenAIModel(model, api_base=f"{url}/v1", api_key=key(), client_kwargs={"max_retries": 0})
    agent = smol.ToolCallingAgent(
        tools=[smol.tool(add)], model=chosen, max_steps=STEPS, stream_outputs=api.endswith("-stream"), verbosity_level=0
    )
    return str(agent.run(TASK))


def mini_swe_agent(api: str, url: str, model: str) -> str:
    """Run mini-swe-agent with its settings for tool calls, in an empty directory."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel
    from minisweagent.models.litellm_response_model import LitellmResponseModel

    config = get_config_from_spec("mini.yaml")
    provider, base = ("anthropic", url) if api == "messages" else ("openai", f"{url}/v1")
    kwargs = {"api_base": base, "api_key": key(), "drop_params": True}
    names = ("observation_template", "format_error_template")
    kept = {name: config["model"][name] for name in names if name in config["model"]}
    made = (LitellmResponseModel if api == "responses" else LitellmModel)(
        model_name=f"{provider}/{model}", model_kwargs=kwargs, cost_tracking="ignore_errors", **kept
    )
    settings = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(made, LocalEnvironment(cwd=folder), step_limit=STEPS, **settings)
        ended = agent.run(TASK)
        with (Path(folder) / "sums").open() as sums:
            CALLS.extend([int(line) - 1, 1] for line in sums)
    return f"{ended['submission'].strip()}"


if __name__ == "__main__":
    _, chosen_agent, chosen_model, wanted = sys.argv
    seen = []
    for chosen_api, chosen_url, given_key in json.loads(wanted):
        os.environ |= {"OPENAI_API_KEY": given_key, "ANTHROPIC_API_KEY": given_key}
        CALLS.clear()
        print("begins", chosen_api, chosen_url, flush=True)
        said = globals()[chosen_agent](chosen_api, chosen_url, chosen_model)
        seen.append({"calls": list(CALLS), "answer": said.strip()})
    # Some agents write to stdout without a line end.
    print("\nseen", json.dumps({"runs": seen}))
