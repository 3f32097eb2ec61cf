"""Generations that fall silent are ended; those that give tokens are not, however long they take."""

from collections.abc import AsyncIterator, Sequence

import pytest

import rollbus
from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.frontend.http.settings import Settings
from rollbus.frontend.http.silence import Silence, SilenceWatch
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.workers.engines.synthetic import SyntheticConfig, SyntheticEngine
from tests.http.support import http_before, http_service
from tests.support.fleet import is_idle
from tests.support.gated_engine import running
from tests.support.presences import presence
from tests.support.waits import until_true

GENERATE = "/inference/v1/generate"
STATES = {"w": WorkerState.SERVING, "paused": WorkerState.PAUSED}


def seconds_after(*steps: str | None) -> float:
    """Silence of three seconds after each of these: tokens of a worker, or None for a slow reader."""
    silence = Silence()
    for worker in steps:
        if worker is not None:
            silence.heard(worker)
            silence.resume()
        else:
            silence.heard("w")
        silence.add(3.0, STATES)
    return silence.seconds


def test_what_counts_as_silence() -> None:
    """The time of a worker that serves, since its last token."""
    silence = Silence()
    silence.add(3.0, STATES)
    assert silence.seconds == 0.0
    assert seconds_after("w") == seconds_after("w", "w") == 3.0
    assert seconds_after("paused") == seconds_after("gone") == seconds_after(None) == 0.0


def test_a_request_is_aborted_once() -> None:
    """When its silence is as long as is allowed; those that have ended are forgotten."""
    aborted: list[str] = []
    serving: list[WorkerPresence] = [presence()]

    async def abort(request_ids: Sequence[str]) -> None:
        aborted.extend(request_ids)

    watch = SilenceWatch(10.0, lambda: serving, abort)
    request = rollbus.GenerateRequest(prompt_token_ids=[1])
    with watch.watched(request) as silence:
        watch.check(silence, request.request_id)
        silence.heard("w")
        silence.resume()
        assert [watch.tick(4.0, 10.0) for _ in range(4)] == [[], [], [request.request_id], []]
        with pytest.raises(rollbus.RequestTimeout, match="no token came for 10 s"):
            watch.check(silence, request.request_id)
    assert watch.tick(100.0, 10.0) == []


class SilentEngine(SyntheticEngine):
    """Gives each request some tokens, and then nothing."""

    async def steps(self) -> AsyncIterator[Sequence[RequestStep]]:
        """Stop to hand over steps, as an engine that hangs."""
        given = 0
        async for steps in super().steps():
            given += 1
            if given <= 3:
                yield split(steps)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_silent_generation_is_a_timeout(nats_url: str, fleet: str, stream: bool) -> None:
    """504 for a whole answer, the last event of a stream; nothing is left in the engine."""
    engine = SilentEngine(SyntheticConfig(step_s=0.01))
    async with running(nats_url, fleet, engine), http_before(nats_url, fleet, Settings(stall_timeout_s=1.0)) as http:
        await http.own.fleet.wait_for_workers()
        body = {"token_ids": [1, 2], "sampling_params": {"ignore_eos": True}, "stream": stream}
        answer = await http.client.post(GENERATE, json=body)
        await until_true(lambda: is_idle(engine))
    if stream:
        assert "no token came for 1 s" in answer.text.split("\n\n")[-2]
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


async def test_a_long_generation_is_not_cut(nats_url: str, fleet: str) -> None:
    """It takes several times as long as silence may."""
    config = SyntheticConfig(step_s=0.05)
    async with http_service(nats_url, fleet, Settings(stall_timeout_s=2.0), config=config) as http:
        body = {"token_ids": [1, 2], "sampling_params": {"ignore_eos": True, "max_tokens": 100}}
        answer = await http.client.post(GENERATE, json=body)
    assert len(answer.json()["choices"][0]["token_ids"]) == 100
