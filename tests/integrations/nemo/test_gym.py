"""NeMo Gym 0.7 from PyPI, unchanged: its environments, agent and `vllm_model` on two vLLM workers, over HTTP.

Its metadata asks for Python 3.13.14. Here it runs on 3.13, installed with pip's `--ignore-requires-python`, and all of
its servers share one Python environment by its option `uv_venv_dir`.
"""

import asyncio
import json
import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from rollbus.frontend.http import Settings
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.http.support import Http, http_before, http_service
from tests.integrations.environments import CALL, CALL_END, teach_tool_calls, token_id
from tests.integrations.support import find_python, needs, run_program
from tests.support.real_fleet import RealWorkers

pytestmark = needs("nemo")

PROGRAM = Path(__file__).parent / "programs" / "gym_rollouts.py"
COUNTER, SYNONYMS = "example_session_state_mgmt", "example_multi_step"
"""Environments of NeMo Gym. The first one's tools have a state for each rollout."""
CALLS = {
    COUNTER: r'\{"name": "increment_counter", "arguments": \{"count": [1-9]\}\}',
    SYNONYMS: r'\{"name": "get_synonym_value", "arguments": \{"synonym": "[a-z]{3,9}"\}\}',
}
TURNS = 3
TOLERANCE = 1e-4
"""Maximum difference of float32 log probabilities that were computed in different batches."""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def forced(checkpoint: Path, environments: list[str]) -> dict[str, Any]:
    """Return parameters that make the tiny model, which writes noise, call the environments' tools.

    A grammar restricts its answers to calls, with arguments that the model chooses. A bias makes it write each mark of
    a call as one token.
    """
    call = "|".join(CALLS[name] for name in environments)
    bias = {str(token_id(checkpoint, token)): 100.0 for token in (CALL, CALL_END)}
    return {
        "max_tokens": 200,
        "structured_outputs": {"regex": rf"<tool_call>\n({call})\n</tool_call>"},
        "logit_bias": bias,
    }


async def collect(
    http: Http,
    checkpoint: Path,
    folder: Path,
    extra_body: dict[str, Any],
    on_line: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Collect rollouts with NeMo Gym and return them."""
    rest = {"turns": TURNS, "first": 0, "repeats": 1, "late": 0, "gate": "/", "parameters": {}, **settings}
    rest |= {"port": free_port(), "model": {"extra_body": extra_body, **settings.get("model", {})}}
    seen = await run_program(
        *(PROGRAM, http.url, "caller-0", folder, json.dumps(rest)), python=find_python("nemo"), on_line=on_line
    )
    rollouts: list[dict[str, Any]] = seen["rollouts"]
    return rollouts


def turns_of(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a rollout that a trainer learns from."""
    output = rollout["result"]["response"]["output"]
    return [item for item in output if item.get("generation_token_ids")]


def is_first(line: str) -> bool:
    """Return True for the line that reports the first rollout. NeMo Gym's progress bar may stand before it."""
    return line.endswith("rollouts 1")


async def equal_turns(rb: rollbus.Client, rollout: dict[str, Any], sampling: dict[str, Any]) -> list[bool]:
    """Return for each greedy turn whether a bus client that repeats it receives its tokens and log probabilities."""
    found: list[bool] = []
    for turn in turns_of(rollout):
        prompt, tokens = turn["prompt_token_ids"], turn["generation_token_ids"]
        repeated = await rb.complete(
            rollbus.GenerateRequest(
                prompt_token_ids=prompt,
                sampling=rollbus.SamplingParams(
                    temperature=0,
                    logprobs=0,
                    max_tokens=sampling["max_tokens"],
                    logit_bias={int(token): bias for token, bias in sampling["logit_bias"].items()},
                    extra={"structured_outputs": sampling["structured_outputs"]},
                ),
            )
        )
        found.append(
            repeated.token_ids.tolist() == tokens
            and np.allclose(repeated.logprobs, turn["generation_log_probs"], rtol=0, atol=TOLERANCE)
        )
    return found


def check_calls(rollouts: list[dict[str, Any]], count: int) -> None:
    """Assert that there are so many rollouts, and that each one called a tool in each turn."""
    assert len(rollouts) == count
    for rollout in rollouts:
        kinds = [item["type"] for item in rollout["result"]["response"]["output"]]
        assert kinds == ["function_call", "function_call_output"] * TURNS
        assert len(turns_of(rollout)) == TURNS


@pytest.mark.parametrize("inline", [True, False], ids=["in the answer", "from /tokenize"])
async def test_ids_and_log_probabilities_of_rollouts_are_those_of_the_engine(
    nats_url: str, tmp_path: Path, inline: bool
) -> None:
    """NeMo Gym returns what a bus client receives, whether it takes the prompt's ids from the answer or `/tokenize`."""
    checkpoint = make_tiny_moe(tmp_path / "caller-0", dtype="float32")
    teach_tool_calls(checkpoint)
    settings, fleet = Settings(tool_call_parser="hermes", tokenizer=checkpoint), f"gym-{uuid.uuid4().hex[:8]}"
    async with http_service(nats_url, fleet, settings, model="caller-0") as http:
        rollouts = await collect(
            *(http, checkpoint, tmp_path, {"max_tokens": 20}),
            environments=[COUNTER, SYNONYMS],
            tasks=2,
            parameters={"temperature": 0.0},
            model={"request_prompt_and_generation_token_ids": inline},
        )
        assert len(rollouts) == 4
        for rollout in rollouts:
            (turn,) = turns_of(rollout)
            wanted = await http.rb.complete(turn["prompt_token_ids"], max_tokens=20, temperature=0.0)
            assert turn["generation_token_ids"] == wanted.token_ids.tolist()
            assert np.allclose(turn["generation_log_probs"], wanted.logprobs, atol=1e-6)
            assert rollout["result"]["reward"] == 0.0, "the synthetic engine calls no tool"


@pytest.mark.vllm
@pytest.mark.routing
async def test_rollouts_with_tools_lose_nothing_if_a_worker_is_killed(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers, tmp_path: Path
) -> None:
    """Tools run, and the ids and log probabilities of each turn are those that the engine sampled."""
    checkpoint, environments = callers[0], [COUNTER, SYNONYMS]
    extra = forced(checkpoint, environments)
    first = next(iter((await caller_workers.have(2)).values()))

    def kill(line: str) -> None:
        if is_first(line):
            first.kill()

    async with http_before(nats_url, caller_workers.fleet, Settings(tool_call_parser="hermes")) as http:
        await http.own.fleet.wait_for_workers(2)
        rollouts = await collect(
            *(http, checkpoint, tmp_path, extra, kill),
            environments=environments,
            tasks=3,
            repeats=2,
            parameters={"temperature": 0.0},
        )
        assert first.poll() is not None, "it was killed"
        check_calls(rollouts, 12)
        for rollout in rollouts:
            assert await equal_turns(http.rb, rollout, extra) == [True] * TURNS


@pytest.mark.vllm
@pytest.mark.routing
async def test_new_weights_in_the_middle_of_rollouts(
    nats_url: str, callers: tuple[Path, Path], updated_workers: RealWorkers, tmp_path: Path
) -> None:
    """No rollout is lost. Turns before the update are those of the old weights, turns after it those of the new."""
    environments, gate, late = [COUNTER, SYNONYMS], tmp_path / "gate", 4
    extra = forced(callers[0], environments)
    await updated_workers.have(2)
    async with http_before(nats_url, updated_workers.fleet, Settings(tool_call_parser="hermes")) as http:
        await http.own.fleet.wait_for_workers(2)

        async def update() -> None:
            await http.rb.fleet.update_weights(callers[1], version=1)
            gate.touch()

        async with asyncio.TaskGroup() as group:

            def begin(line: str) -> None:
                if is_first(line):
                    group.create_task(update())

            rollouts = await collect(
                *(http, callers[0], tmp_path, extra, begin),
                environments=environments,
                tasks=3,
                first=1,
                repeats=2,
                late=late,
                gate=str(gate),
                parameters={"temperature": 0.0},
            )
        check_calls(rollouts, 12)
        new = [await equal_turns(http.rb, rollout, extra) for rollout in rollouts]
        await http.rb.fleet.update_weights(callers[0], version=2)
        old = [await equal_turns(http.rb, rollout, extra) for rollout in rollouts]
    assert new[-late:] == [[True] * TURNS] * late
    assert old[-late:] == [[False] * TURNS] * late
    assert [True] * TURNS in old[:-late], "the first rollout ended before the update"
    for of_old, of_new in zip(old[:-late], new[:-late], strict=True):
        # Only the turn in which the weights changed has tokens of both.
        order = "".join("o" if a else "n" if b else "?" for a, b in zip(of_old, of_new, strict=True))
        assert re.fullmatch("o*[?]?n*", order), order
