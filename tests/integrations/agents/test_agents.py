"""Published agents, unchanged, with a tool loop of five turns on a real engine, over the three APIs, streamed and not.

A model with random weights does not call tools. So the test adds a grammar to each request to the engine, which allows
only the text of the agent's turn. The engine samples this text, and everything after it is as for any model.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import rollbus
from rollbus.frontend.http import Settings
from rollbus.frontend.http.openai import routes
from rollbus.frontend.http.openai.body import ChatBody
from tests.http.support import Http, http_before
from tests.integrations.support import find_python, needs, run_program
from tests.sessions.families import TEMPLATES
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, needs("agents")]

PROGRAM = Path(__file__).parent / "programs" / "harness.py"
TURNS = 5
ANSWER = "The sum is 5."
PAIRS = [
    *[("openai_sdk", api) for api in ("responses", "responses-stream")],
    *[("anthropic_sdk", api) for api in ("messages", "messages-stream")],
    *[("openai_agents", api) for api in ("responses", "responses-stream", "chat")],
    *[("pydantic_ai", api) for api in ("chat", "responses", "responses-stream", "messages", "messages-stream")],
    *[("litellm", api) for api in ("chat-stream", "responses", "responses-stream", "messages", "messages-stream")],
    *[("smolagents", api) for api in ("chat", "chat-stream")],
    *[("mini_swe_agent", api) for api in ("chat", "responses", "messages")],
]
WANTED: ContextVar[str] = ContextVar("wanted")


def text_of_turn(body: ChatBody) -> str:
    """Return what the model writes next: a call of the tool that the agent offers, then its answer."""
    turn = sum(message["role"] == "assistant" for message in body.messages or ())
    names = {tool["function"]["name"] for tool in body.tools or ()}
    call: tuple[str, dict[str, Any]]
    if "bash" in names:
        last = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{ANSWER}'"
        call = ("bash", {"command": f"echo {turn + 1} | tee -a sums" if turn < TURNS else last})
    elif turn < TURNS:
        call = ("add", {"a": turn, "b": 1})
    elif "final_answer" in names:
        call = ("final_answer", {"answer": ANSWER})
    else:
        return ANSWER
    return f"<tool_call>{json.dumps({'name': call[0], 'arguments': call[1]})}</tool_call>"


@pytest.fixture(scope="session")
def agent_workers(nats_url: str, callers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """VLLM workers of a fleet whose tokenizer has the tokens of tool calls."""
    workers = RealWorkers(nats_url, callers[0], version=0, cache=tmp_path_factory.mktemp("cache"))
    yield workers
    workers.stop()


@asynccontextmanager
async def forced(
    workers: RealWorkers, nats_url: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Path | None = None
) -> AsyncIterator[Http]:
    """Serve the fleet. The engine may sample only the text of each turn."""
    await workers.have(1)
    chat_route: Any = routes
    prepare_answer, build_request = chat_route.prepare_answer, chat_route.build_request

    async def note_turn(service: Any, request: Any, body: ChatBody, *more: Any) -> Any:
        WANTED.set(text_of_turn(body))
        return await prepare_answer(service, request, body, *more)

    def force(*given: Any, sampling: rollbus.SamplingParams, **more: Any) -> rollbus.GenerateRequest:
        extra = {**(sampling.extra or {}), "structured_outputs": {"choice": [WANTED.get()]}}
        request: rollbus.GenerateRequest = build_request(*given, sampling=replace(sampling, extra=extra), **more)
        return request

    monkeypatch.setattr(routes, "prepare_answer", note_turn)
    monkeypatch.setattr(routes, "build_request", force)
    async with http_before(nats_url, workers.fleet, Settings(tool_call_parser="hermes", tokenizer=tokenizer)) as http:
        await http.own.fleet.wait_for_workers()
        yield http


@pytest.mark.parametrize(("agent", "api"), PAIRS)
async def test_an_agent_calls_its_tool_in_five_turns_and_answers(
    nats_url: str, agent_workers: RealWorkers, monkeypatch: pytest.MonkeyPatch, agent: str, api: str
) -> None:
    """Each agent calls its tool five times, in order and with the arguments that the model wrote, and then answers."""
    async with forced(agent_workers, nats_url, monkeypatch) as http:
        (worker,) = http.own.fleet.workers
        seen = await run_program(PROGRAM, agent, api, http.url, worker.model, python=find_python("agents"))
    assert seen == {"calls": [[turn, 1] for turn in range(TURNS)], "answer": ANSWER}


@pytest.mark.parametrize(
    "pair",
    [
        ("openai_agents", "chat"),
        *[("openai_sdk", api) for api in ("responses", "responses-stream")],
        *[("anthropic_sdk", api) for api in ("messages", "messages-stream")],
        *[("pydantic_ai", "responses"), ("litellm", "messages"), ("mini_swe_agent", "chat")],
    ],
)
async def test_a_session_has_the_tokens_that_the_engine_sampled_for_an_agent(
    nats_url: str,
    agent_workers: RealWorkers,
    monkeypatch: pytest.MonkeyPatch,
    callers: tuple[Path, Path],
    tmp_path: Path,
    pair: tuple[str, str],
) -> None:
    """Six turns of each agent are one branch without a fork, whose sampled ids are the texts that were forced."""
    # The template of the model's own tokenizer leaves calls out, and then every turn is a branch.
    config = json.loads((callers[0] / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((callers[0] / "tokenizer.json").read_bytes())
    config["chat_template"] = (TEMPLATES / "hermes.jinja").read_text().removesuffix("\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with forced(agent_workers, nats_url, monkeypatch, tmp_path) as http:
        (worker,) = http.own.fleet.workers
        session = (await http.client.post("/v1/rl/sessions", json={})).json()
        url, key = session["base_url"].removesuffix("/v1"), session["api_key"]
        seen = await run_program(PROGRAM, *pair, url, worker.model, key, python=find_python("agents"))
        assert seen["calls"] == [[turn, 1] for turn in range(TURNS)]
        (sample,) = (await http.client.get(f"/v1/rl/sessions/{session['id']}/samples")).json()["samples"]
        assert sample["forks"] == [None] * (TURNS + 1)
        places, sampled = np.array(sample["turn_of_token"]), np.array(sample["loss_mask"])
        texts = []
        for place in range(len(sample["turns"])):
            ids = np.array(sample["token_ids"])[(places == place) & sampled].tolist()
            texts.append((await http.client.post("/detokenize", json={"tokens": ids})).json()["prompt"])
    assert len(texts) == TURNS + 1
    for turn, text in enumerate(texts[:-1]):
        assert f'"a": {turn}, "b": 1' in text or f"echo {turn + 1}" in text
    assert ANSWER in texts[-1]
