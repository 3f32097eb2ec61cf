"""NeMo Gym 0.7 from PyPI, unchanged: its environments, agent and `vllm_model` on two vLLM workers, over HTTP.

Its metadata asks for Python 3.13.14. Here it runs on 3.13, installed with pip's `--ignore-requires-python`, and all of
its servers share one Python environment by its option `uv_venv_dir`.
"""

import json
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


async def check_turns(rb: rollbus.Client, rollout: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Assert that a bus client which repeats each greedy turn receives the same tokens and log probabilities."""
    before: list[int] = []
    for turn in turns_of(rollout):
        prompt = turn["prompt_token_ids"]
        assert prompt[: len(before)] == before, "NeMo-RL requires that turns form one conversation"
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
        assert repeated.token_ids.tolist() == turn["generation_token_ids"]
        assert repeated.logprobs is not None
        assert np.abs(repeated.logprobs - np.array(turn["generation_log_probs"])).max() < TOLERANCE
        before = prompt + turn["generation_token_ids"]


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
    """Tools run, all turns form one conversation, and ids and log probabilities are those that the engine sampled."""
    checkpoint, environments = callers[0], [COUNTER, SYNONYMS]
    extra = forced(checkpoint, environments)
    first = next(iter((await caller_workers.have(2)).values()))

    def kill(line: str) -> None:
        if line == "rollouts 1":
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
        assert len(rollouts) == 12
        for rollout in rollouts:
            output = rollout["result"]["response"]["output"]
            assert [item["type"] for item in output] == ["function_call", "function_call_output"] * TURNS
            assert len(turns_of(rollout)) == TURNS
            await check_turns(http.rb, rollout, extra)
