"""Published environments of verifiers, unchanged, through its own client and the HTTP service on two vLLM workers."""

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.trainer import NOT_SAMPLED
from tests.http.support import Http, http_before
from tests.integrations.environments import CALL, CALL_END, token_id
from tests.integrations.support import ROOT, needs_trainers, run_program, started
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers
from tests.support.waits import ENGINE_HANGS_AFTER_S, busy_timeout

pytestmark = [pytest.mark.vllm, pytest.mark.routing, needs_trainers]

MARBLE = "marble-v1"
"""An environment with a single turn, a package on PyPI."""
TOOLS = "echo-tool-v1"
"""An environment in the source of verifiers' release on PyPI.

It has several turns with a tool, which is a separate program.
"""
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": True, "return_token_ids": True}
"""The sampling parameters that prime-rl's orchestrator passes to verifiers."""
STOPS = [2, 0]
"""Stop token ids that verifiers' client sends: the tiny model's <|im_end|> and <|endoftext|>."""
TOLERANCE = 1e-4
"""Maximum difference of float32 log probabilities that were computed in different batches."""
LAYERS_AND_TOP_K = (4, 4)


async def play(
    http: Http, checkpoint: Path, taskset: str, on_line: Callable[[str], None] | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Play an environment and return its traces. Assert that all traces are complete."""
    rest = {"turns": 1, "folders": [], "gate": "/", **settings}
    seen = await run_program(
        *("verifiers_env.py", http.url, "caller-0", checkpoint, taskset), json.dumps(rest), on_line=on_line
    )
    traces: list[dict[str, Any]] = seen["traces"]
    assert [trace["errors"] for trace in traces] == [[]] * (rest["tasks"] * rest["rollouts"])
    return traces


def at_first_trace(action: Callable[[], object]) -> Callable[[str], None]:
    """Return a callback that runs an action when the first episode has ended and others still run."""

    def on_line(line: str) -> None:
        if line == "traces 1":
            action()

    return on_line


def rows_of(sample: dict[str, Any]) -> np.ndarray:
    """Return the routed experts that a trainer receives: a row for each token but the last."""
    assert sample["shape"] == [len(sample["token_ids"]) - 1, *LAYERS_AND_TOP_K]
    shape: tuple[int, ...] = tuple(sample["shape"])
    return np.frombuffer(base64.b64decode(sample["rows"]), np.uint8).reshape(shape)


def versions_of(sample: dict[str, Any]) -> np.ndarray:
    """Return the weight versions of the sampled tokens."""
    versions, sampled = np.array(sample["weight_versions"], np.int32), np.array(sample["loss_mask"], np.bool_)
    assert np.all(versions[~sampled] == NOT_SAMPLED)
    return versions[sampled]


async def check_scores(rb: rollbus.Client, samples: list[dict[str, Any]]) -> None:
    """Assert that the fleet computes equal values for prompts of sampled tokens.

    The tokens were sampled at temperature 1. Compared are log probabilities and experts.
    """
    assert samples
    for sample in samples:
        scored = await rb.complete(
            rollbus.GenerateRequest(
                prompt_token_ids=sample["token_ids"],
                sampling=rollbus.SamplingParams(max_tokens=1, prompt_logprobs=0),
            )
        )
        assert scored.prompt_logprobs is not None
        difference = np.array(sample["logprobs"][1:]) - scored.prompt_logprobs
        assert np.abs(difference[sample["loss_mask"][1:]]).max() < TOLERANCE
        rows = rows_of(sample)
        assert np.array_equal(np.sort(rows), np.sort(scored.routed_experts[: len(rows)]))


async def check_turns(rb: rollbus.Client, trace: dict[str, Any], **sampling: Any) -> None:
    """Assert that a bus client which repeats each turn of a greedy trace receives equal results.

    The comparison covers tokens, log probabilities, weight versions and routed experts.
    """
    (sample,) = trace["samples"]
    at, rows = 0, rows_of(sample)
    for size, num_sampled in trace["sizes"]:
        at += size
        if not num_sampled:
            continue
        begin = at - num_sampled
        repeated = await rb.complete(
            rollbus.GenerateRequest(
                prompt_token_ids=sample["token_ids"][:begin],
                sampling=rollbus.SamplingParams(temperature=0, logprobs=0, stop_token_ids=STOPS, **sampling),
            )
        )
        assert repeated.token_ids.tolist() == sample["token_ids"][begin:at]
        assert repeated.weight_versions.tolist() == sample["weight_versions"][begin:at]
        assert repeated.logprobs is not None
        assert repeated.routed_experts is not None
        assert np.abs(repeated.logprobs - np.array(sample["logprobs"][begin:at])).max() < TOLERANCE
        assert np.array_equal(np.sort(repeated.routed_experts), np.sort(rows[: at - 1]))


async def test_a_worker_killed_during_a_turn_loses_no_answer(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers
) -> None:
    """If a worker is killed during a single turn, the answers that it generated are complete.

    Another client receives the same answers.
    """
    long = {"max_tokens": 500, "min_tokens": 500}
    workers = await caller_workers.have(2)
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers(2)

        async def kill() -> None:
            state = await until_state(http.rb, lambda found: any(worker.in_flight for worker in found.workers))
            workers[next(worker.worker for worker in state.workers if worker.in_flight)].kill()

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            traces = await play(
                http, callers[0], MARBLE, tasks=6, rollouts=2, sampling={**SAMPLING, "temperature": 0.0, **long}
            )
        assert http.own.stats().attempts_lost > 0
        for trace in traces:
            assert trace["roles"] == ["user", "assistant"]
            assert trace["rewards"] == {"scored": 0.0, "answered_legally": 0.0, "closeness": 0.0}, "it is noise"
            await check_turns(http.rb, trace, **long)


async def test_turns_with_tools_form_one_conversation_despite_a_killed_worker(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers, tool_environments: Path
) -> None:
    """Tools run, and all turns form one conversation, also if its worker is killed between them.

    The tiny model writes noise. A grammar therefore restricts its answers to calls of the environment's tool, with a
    message that the model chooses. A bias makes the model write each mark of a call as the one token that the client
    expects.
    """
    turns = 3
    call = r'<tool_call>\n\{"name": "echo_back", "arguments": \{"message": "[a-z ]{2,9}"\}\}\n</tool_call>'
    grammar = {"structured_outputs": {"regex": call}}
    forced = {"max_tokens": 200, "logit_bias": {token_id(callers[0], token): 100.0 for token in (CALL, CALL_END)}}
    first = next(iter((await caller_workers.have(2)).values()))
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers(2)
        traces = await play(
            *(http, callers[0], TOOLS, at_first_trace(first.kill)),
            tasks=1,
            rollouts=6,
            turns=turns,
            folders=[str(tool_environments)],
            sampling={"temperature": 0.0, **forced, **grammar},
        )
        for trace in traces:
            assert trace["roles"] == ["user", *["assistant", "tool"] * (turns - 1), "assistant"]
            assert trace["finish_reasons"][:turns] == ["tool_calls"] * turns
            assert all("[ok-7f3]" in result for result in trace["results"]), "the tool writes this"
            await check_turns(http.rb, trace, **forced, extra=grammar)


async def test_each_token_has_its_version_if_the_weights_change_during_environments(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers, tmp_path: Path
) -> None:
    """Each token has the version that sampled it.

    The fleet computes equal scores for samples of the new weights at temperature 1.
    """
    gate = tmp_path / "gate"
    await caller_workers.have(2)
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers(2)

        async def update() -> None:
            await http.rb.fleet.update_weights(callers[1], version=1)
            gate.touch()

        async with asyncio.TaskGroup() as group:
            traces = await play(
                *(http, callers[0], MARBLE, at_first_trace(lambda: group.create_task(update()))),
                tasks=3,
                rollouts=4,
                gate=str(gate),
                sampling={**SAMPLING, "max_tokens": 600},
            )
        samples = [sample for trace in traces for sample in trace["samples"]]
        assert all(np.all(np.diff(versions_of(sample)) >= 0) for sample in samples)
        assert {version for sample in samples for version in versions_of(sample)} == {0, 1}
        new = [sample for sample in samples if versions_of(sample).min() == 1]
        assert len(new) >= 4, "all of the last task"
        await check_scores(http.rb, new)


async def test_the_verifiers_example_runs_with_the_command_in_its_header(
    nats_url: str, caller_workers: RealWorkers
) -> None:
    """The example runs with the command in its header, on a model of which renderers know only the chat template."""
    await caller_workers.have(1)
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers()
        async with (
            busy_timeout(ENGINE_HANGS_AFTER_S),
            started(str(ROOT / "examples" / "verifiers_env.py"), "--http", http.url, "--steps", 1) as process,
        ):
            said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.startswith("task 1: rewards [0.0, 0.0, 0.0, 0.0]"), said
    assert said.count("tokens sampled by weights") == 4, said
