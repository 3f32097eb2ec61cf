"""Published agents, unchanged, with a tool loop of five turns on a real engine, over the three APIs, streamed and not.

Each runs on the ordinary routes and in a session, from which its samples come out as the engine sampled them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbus import FleetState
from rollbus.schemas.presence import WorkerState
from tests.http.support import Http, rows_of
from tests.integrations.agents.support import (
    ANSWER,
    TURNS,
    NotedWorkers,
    check_sample,
    forced,
    noted_workers,
)
from tests.integrations.support import PYTHON, find_python, needs, run_program
from tests.sessions.support import Owner, agent_of
from tests.support.fleet import until_state
from tests.support.noted_steps import read_notes, sampled_of
from tests.support.second_pass import check_second_pass

pytestmark = [pytest.mark.vllm, pytest.mark.routing, needs("agents")]

PROGRAMS = Path(__file__).parent / "programs"
APIS = {
    "openai_sdk": ("chat", "chat-stream", "responses", "responses-stream"),
    "anthropic_sdk": ("messages", "messages-stream"),
    "openai_agents": ("responses", "responses-stream", "chat"),
    "pydantic_ai": ("chat", "responses", "responses-stream", "messages", "messages-stream"),
    "litellm": ("chat-stream", "responses", "responses-stream", "messages", "messages-stream"),
    "smolagents": ("chat", "chat-stream"),
    "mini_swe_agent": ("chat", "responses", "messages"),
}
RAN = {"calls": [[turn, 1] for turn in range(TURNS)], "answer": ANSWER}
"""What the program of an agent has seen in each run."""
DIES_AFTER = 12
"""Tokens of a turn after which its worker dies."""


@pytest.fixture(scope="module")
def noted(
    nats_url: str, callers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NotedWorkers]:
    """VLLM workers of a fleet whose tokenizer has the tokens of tool calls."""
    with noted_workers(nats_url, callers[0], tmp_path_factory.mktemp("noted")) as made:
        yield made


@pytest.mark.parametrize("agent", APIS)
async def test_an_agent_calls_its_tool_in_five_turns_and_its_session_has_what_the_engine_sampled(
    noted: NotedWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agent: str
) -> None:
    """Each agent calls its tool five times, in order and with the arguments that the model wrote, and then answers.

    Its session is one branch without a fork, except for smolagents, which writes earlier calls as text. Tokens, log
    probabilities and rows of routed experts are those that the engine sampled, and a second forward pass computes the
    same.
    """
    await noted.workers.have(1)
    async with forced(noted, monkeypatch, tmp_path) as served:
        (worker,) = served.http.own.fleet.workers
        sessions = [await served.open() for _ in APIS[agent]]
        runs = [(api, url, session["api_key"]) for api, (session, url) in zip(APIS[agent], sessions, strict=True)]
        runs += [(api, served.http.url, "none") for api in APIS[agent]]
        arguments = (agent, worker.model, json.dumps(runs))
        seen = await run_program(PROGRAMS / "harness.py", *arguments, python=find_python("agents"))
        wrong = [(run[:2], found) for run, found in zip(runs, seen["runs"], strict=True) if found != RAN]
        assert not wrong, json.dumps(wrong)
        for session, _ in sessions:
            await served.check_session(session, is_branch=agent != "smolagents")


@needs("trainers")
async def test_an_environment_of_verifiers_in_a_session_has_what_the_engine_sampled(
    noted: NotedWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool_environments: Path
) -> None:
    """An environment whose agent sends chats to a session gives the same sample as the engine, without tokens."""
    await noted.workers.have(1)
    async with forced(noted, monkeypatch, tmp_path) as served:
        (worker,) = served.http.own.fleet.workers
        session, url = await served.open()
        arguments = (worker.model, url, session["api_key"], tool_environments, TURNS + 3)
        seen = await run_program(PROGRAMS / "verifiers_chat.py", *arguments, python=PYTHON)
        assert seen["errors"] == []
        assert len(seen["results"]) == TURNS
        assert all(f"turn {turn}" in result for turn, result in enumerate(seen["results"]))
        assert seen["answer"] == ANSWER
        await served.check_session(session)


async def test_a_worker_killed_in_every_turn_changes_no_sample(
    noted: NotedWorkers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If SIGKILL ends the worker of each turn while it samples, the sample is as exact as without it.

    The turns of an agent, whose grammar no other worker can continue, start over. Turns of free text go on with the
    tokens that the service has of the first attempt.
    """
    await noted.workers.have(0)
    with noted_workers(noted.nats_url, noted.checkpoint, tmp_path) as dying:
        workers = dying.workers

        async def have_two() -> None:
            def is_met(state: FleetState) -> bool:
                serving = {each.worker for each in state.workers if each.state is WorkerState.SERVING}
                return len(serving & workers.living.keys()) >= 2

            await until_state(served.http.own, is_met)

        async def replace_dead() -> None:
            while True:
                while len(workers.living) < 2:
                    workers.add(dies_after=DIES_AFTER)
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as group:
            replacing = group.create_task(replace_dead())
            async with forced(dying, monkeypatch, tmp_path) as served:
                session, url = await served.open()
                served.before_turn = have_two
                (worker, *_) = served.http.own.fleet.workers
                arguments = ("openai_sdk", worker.model, json.dumps([("chat-stream", url, session["api_key"])]))
                seen = await run_program(PROGRAMS / "harness.py", *arguments, python=find_python("agents"))
                assert seen["runs"] == [RAN]
                await served.check_session(session, attempts=2)
                monkeypatch.undo()
                sample, requests = await talk(served.http, worker.model, have_two)
            replacing.cancel()
        notes = read_notes(dying.notes)
        found = [sampled_of(notes[request]) for request in requests]
        assert sample["attempts"] == [2] * len(requests)
        # Of the first attempts, the service has up to `DIES_AFTER` tokens each.
        assert sum(each.num_resumed for each in found) > len(requests)
        check_sample(sample, found)
        check_second_pass(noted.checkpoint, sample, rows_of(sample["routed_experts"]))


async def talk(
    http: Http, model: str, before_turn: Callable[[], Awaitable[object]]
) -> tuple[dict[str, Any], list[str]]:
    """Send two questions in a session, the second one streamed. Return its sample, and the ids of its requests."""
    owner = Owner(http.client)
    session = await owner.open(routed_experts=True)
    messages: list[Any] = []
    async with agent_of(session) as agent:
        for turn in range(2):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            await before_turn()
            asked: Any = {"model": model, "messages": messages, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
            answer: Any = await agent.chat.completions.create(**asked, stream=bool(turn))
            if turn:
                # It is the last turn, so nothing follows its text.
                assert [event async for event in answer]
            else:
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    (sample,) = await owner.samples(session)
    requests = {turn["id"]: turn["request_id"] for turn in (await owner.read(session))["turns"]}
    return sample, [requests[turn] for turn in sample["turns"]]
