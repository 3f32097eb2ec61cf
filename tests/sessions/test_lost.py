"""Turns whose sampler has a state, for example a seed or a grammar, which no other worker can continue."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from msgspec.structs import replace

from rollbus import bus
from rollbus.frontend.http import Settings, writer
from rollbus.frontend.http.agents import format
from rollbus.frontend.http.answers import AnswerChoice
from rollbus.frontend.http.sessions import running
from rollbus.schemas.errors import EngineDead, ErrorCode, request_error
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.bus.record.test_rows import generation
from tests.http.support import http_before
from tests.sessions.support import CONFIG, Owner, Serving, agent_of, save_qwen3
from tests.support.fleet import synthetic_worker, until_state
from tests.support.waits import UNHURRIED_LEASE_S, until, until_true

ASKED: dict[str, Any] = {
    "model": "synthetic",
    "messages": [{"role": "user", "content": "How much is 1 + 2?"}],
    "seed": 7,
    "max_tokens": 60,
    "extra_body": {"ignore_eos": True},
}


async def sampled(owner: Owner, session: dict[str, Any], **query: Any) -> tuple[list[int], list[float], list[int]]:
    """Return the tokens of a session's only sample, its log probabilities and the attempts."""
    (sample,) = await owner.samples(session, **query)
    return sample["token_ids"], sample["logprobs"], sample["attempts"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_seeded_turn_starts_over_if_its_worker_is_lost(
    nats_url: str, fleet: str, tmp_path: Path, stream: bool
) -> None:
    """A turn with a seed whose engine dies has the tokens of an undisturbed one, streamed or not."""
    config = replace(CONFIG, step_s=0.05)
    engines = {name: SyntheticEngine(config) for name in ("w0", "w1")}
    fields: dict[str, Any] = {"nats_url": nats_url, "fleet": fleet, "model": "synthetic", "listen_s": 0.0}
    workers = [
        Worker(WorkerConfig(**fields, worker_id=name, lease_s=UNHURRIED_LEASE_S), engine)
        for name, engine in engines.items()
    ]

    async def run(worker: Worker) -> None:
        with contextlib.suppress(EngineDead):
            await worker.run()

    settings = Settings(tokenizer=save_qwen3(tmp_path))
    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(run(worker))
        async with http_before(nats_url, fleet, settings) as http:
            await http.own.fleet.wait_for_workers(2)
            owner, found = Owner(http.client), []

            async def kill() -> None:
                await until_true(lambda: any(engine.stats.running for engine in engines.values()))
                await asyncio.sleep(config.step_s * 5)
                next(engine for engine in engines.values() if engine.stats.running).kill()

            for is_killed in (False, True):
                session = await owner.open()
                async with agent_of(session) as agent:
                    killing = tasks.create_task(kill()) if is_killed else None
                    answer: Any = await agent.chat.completions.create(**ASKED, stream=stream)
                    if stream:
                        assert [event async for event in answer]
                    if killing is not None:
                        await killing
                found.append(await sampled(owner, session))
        for worker in workers:
            worker.stop()
    assert [each[2] for each in found] == [[1], [2]]
    assert found[0][:2] == found[1][:2]


async def test_a_seeded_turn_that_is_stopped_keeps_its_tokens(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its client leaves, a turn with a seed ends with the tokens so far, as one without."""
    monkeypatch.setattr(running, "ATTACH_S", 0.05)
    config = replace(CONFIG, step_s=0.01)
    settings = Settings(tokenizer=save_qwen3(tmp_path))
    async with (
        synthetic_worker(nats_url, fleet, config=config),
        http_before(nats_url, fleet, settings) as http,
    ):
        await http.own.fleet.wait_for_workers()
        owner = Owner(http.client)
        session = await owner.open()
        async with agent_of(session) as agent, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(agent.chat.completions.create(**{**ASKED, "max_tokens": 2000}))
            await until_state(http.own, lambda state: any(each.in_flight for each in state.workers))
            await asyncio.sleep(config.step_s * 5)
            asked.cancel()
        await until(lambda: owner.num_turns(session), 1)
        (turn,) = (await owner.read(session))["turns"]
        assert (turn["is_complete"], turn["finish_reason"]) == (False, "abort")
        assert 0 < turn["num_sampled"] < 2000
        tokens, logprobs, _ = await sampled(owner, session, interrupted=True)
        assert sum(each != 0 for each in logprobs) == turn["num_sampled"] < len(tokens)


async def test_a_stateful_turn_that_fails_keeps_its_tokens_and_shows_meanwhile_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates without tokens come while a turn runs. If it fails, its tokens come before the error."""
    monkeypatch.setattr(running, "KEEP_ALIVE_S", 0.01)
    request = bus.GenerateRequest(prompt_token_ids=[1], sampling=bus.SamplingParams(seed=7, logprobs=0))
    lost = request_error(ErrorCode.TIMEOUT, "it took too long")
    may_fail = asyncio.Event()

    class Service:
        """Has a request that fails after four tokens."""

        async def complete(self, *_: Any, raises: bool) -> bus.Generation:
            """Return the failed result."""
            await may_fail.wait()
            assert not raises
            fields: dict[str, Any] = {"error": lost, "finish_reason": bus.FinishReason.ERROR, "lora_versions": None}
            return generation(request=request, top_token_ids=None, top_logprobs=None, prompt_logprobs=None, **fields)

    turn, choice = running.RunningTurn("", "", is_stream=True), AnswerChoice(0, request, None, keep=True)
    unused: Any = None
    service: Any = Service()
    found = []

    async def read() -> None:
        async for added in turn.source(service, unused, [request], [choice]):
            found.append(list(added))
            may_fail.set()

    with pytest.raises(bus.RequestError, match="too long"):
        await read()
    assert [len(each) for each in found] == [*([0] * (len(found) - 1)), 1]
    assert len(found) > 1
    assert (choice.num_tokens, choice.finish_reason) == (4, None)


async def test_a_stateful_turn_that_fails_after_a_comment_is_an_error_that_each_client_raises(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is sent with the first comment. So the error is an event, in the form that the API's client raises."""
    for module in (running, writer, format):
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.05)
    config = replace(CONFIG, step_s=0.05)
    plain = {"tool_call_parser": None, "reasoning_parser": None}
    async with serve(config=config, **plain) as (_, owner):
        session = await owner.open()
        claude = anthropic.AsyncAnthropic(
            base_url=session["base_url"].removesuffix("/v1"), api_key=session["api_key"], max_retries=0
        )
        more = {"seed": 7, "ignore_eos": True, "timeout_s": 2.0}
        asked: dict[str, Any] = {"model": "synthetic", "stream": True}
        async with agent_of(session) as agent, claude:
            messages = ASKED["messages"]
            for create, fields in (
                (agent.chat.completions.create, {"messages": messages, "max_tokens": 900}),
                (agent.responses.create, {"input": messages, "max_output_tokens": 900}),
                (claude.messages.create, {"messages": messages, "max_tokens": 900}),
            ):
                events = await create(**asked, **fields, extra_body=more)
                with pytest.raises((openai.APIError, anthropic.APIStatusError), match="within 2 s"):
                    [event async for event in events]


async def test_a_stateful_turn_that_is_stopped_before_it_begins_ends_with_the_reason() -> None:
    """A turn that waits for a worker when it is stopped has a finish reason, and is no empty answer without one."""

    class Service:
        """Has a request that waits, and that no worker has to abort."""

        def __init__(self) -> None:
            self.rb = self

        async def complete(self, *_: Any, **__: Any) -> None:
            """Wait."""
            await asyncio.Event().wait()

        async def abort(self, _: list[str]) -> list[str]:
            """Return no aborted request."""
            return []

    turn = running.RunningTurn("", "", is_stream=False)
    request = bus.GenerateRequest(prompt_token_ids=[1], sampling=bus.SamplingParams(seed=7))
    choice = AnswerChoice(0, request, None, keep=True)
    unused: Any = None
    service: Any = Service()
    asyncio.get_running_loop().call_later(0.01, turn.stop)
    async for added in turn.source(service, unused, [request], [choice]):
        list(added)
    assert (choice.finish_reason, turn.was_aborted) == ("abort", True)
