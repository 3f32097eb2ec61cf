"""Workers that a test may kill and update, and the log probabilities of a checkpoint by Hugging Face."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.http.support import Http
from tests.integrations.support import find_python, run_program
from tests.support.real_fleet import RealWorkers

LogProbs = Callable[..., np.ndarray]


@pytest.fixture
def workers(nats_url: str, callers: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """VLLM workers of a fleet that starts with the first of `callers` as version 0."""
    fleet = RealWorkers(nats_url, callers[0], version=0, cache=tmp_path / "cache")
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def logprobs() -> LogProbs:
    """Return a function that computes the log probability of each token of a sequence after the first.

    With `min_tokens: 1`, the first token of an answer is none of the stop tokens. The function therefore takes ids that
    are `excluded`, and a mask `firsts` of the tokens after the first that they cannot be.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    models = {}

    def compute(
        checkpoint: Path, token_ids: list[int], firsts: np.ndarray | None = None, excluded: Sequence[int] = ()
    ) -> np.ndarray:
        if checkpoint not in models:
            models[checkpoint] = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            logits = models[checkpoint](torch.tensor([token_ids])).logits[0, :-1]
        if firsts is not None:
            logits[torch.from_numpy(firsts).nonzero(), torch.tensor(excluded)] = -torch.inf
        sampled = torch.tensor(token_ids[1:])[:, None]
        return np.asarray(logits.log_softmax(-1).gather(1, sampled)[:, 0].numpy())

    return compute


async def run_disturbed(
    program: Path,
    http: Http,
    workers: RealWorkers,
    checkpoints: tuple[Path, Path],
    settings: dict[str, Any],
    *,
    after: tuple[str, int],
) -> dict[str, Any]:
    """Run a program, and return what it saw. Meanwhile one of two workers is killed and the other gets new weights.

    Args:
        settings: the program's settings. It waits for the file `gate` before it goes on with the new weights.
        after: a line of the program, and how often it is printed before the first worker is killed.
    """
    for rb in (http.own, http.rb):
        await rb.fleet.wait_for_workers(2)
    (line, count), printed = after, asyncio.Semaphore(0)

    async def interfere() -> None:
        for _ in range(count):
            await printed.acquire()
        # A killed process counts as living for a moment, so the other is named first.
        killed, other = workers.living
        workers.living[killed].kill()
        body = {"path": str(checkpoints[1]), "version": 1, "workers": [other]}
        answer = await http.client.post("/v1/rl/update_weights", json=body)
        assert answer.status_code == 200, answer.text
        await asyncio.to_thread(Path(settings["gate"]).touch)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(interfere())
        return await run_program(
            *(program, http.url, checkpoints[0], json.dumps(settings)),
            python=find_python("gateways"),
            on_line=lambda shown: printed.release() if shown == line else None,
        )
