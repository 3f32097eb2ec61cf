"""Recomputed KV: the marks of the engine equal the KV with which Hugging Face computes the same results."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.results import TOLERANCE
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm


def request_of(number: int, prompt_len: int, max_tokens: int) -> GenerateRequest:
    """Return a greedy request."""
    return GenerateRequest(
        prompt_token_ids=prompt(prompt_len, seed=1300 + number),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0, ignore_eos=True),
        cache_salt="history",
    )


@dataclass
class History:
    """The result of one request, and the weights of each of its steps."""

    request: GenerateRequest
    result: Result
    models: list[str]

    @property
    def marks(self) -> list[int]:
        """The numbers of the tokens before which all KV was recomputed."""
        return [i for i, step in enumerate(self.result.steps) if step.kv_recomputed]

    def by_hand(self, models: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Return the tokens' log probabilities, each computed with the KV that the versions and marks state."""
        import torch

        sequence = torch.tensor([[*np.asarray(self.request.prompt_token_ids).tolist(), *self.result.token_ids]])
        first = self.request.prompt_len
        changes = [i for i in range(1, len(self.models)) if self.models[i] != self.models[i - 1]]
        cuts = sorted({0, *self.marks, *changes, len(self.models)})
        found, cache = [], None
        for begin, past in pairwise(cuts):
            if begin == 0 or begin in self.marks:
                cache = None
            known = 0 if cache is None else first + begin - 1
            with torch.no_grad():
                made = models[self.models[begin]](
                    sequence[:, known : first + past - 1], past_key_values=cache, use_cache=True
                )
            cache = made.past_key_values
            logits = made.logits[0, -(past - begin) :]
            chosen = sequence[0, first + begin : first + past]
            found.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0].numpy())
        return np.concatenate(found)


async def run(
    running: RunningEngine,
    requests: list[GenerateRequest],
    changes: list[tuple[int, str, Callable[[], Coroutine[Any, Any, Any]]]],
) -> list[History]:
    """Run requests, and make each change on a paused engine as soon as all requests have its number of tokens.

    Args:
        changes: (tokens, the weights from then on, the function that makes the change).
    """
    keys = [await running.add(request) for request in requests]
    histories = {key: History(request, Result(), []) for key, request in zip(keys, requests, strict=True)}
    model = ["own"]
    left = list(changes)
    changing: asyncio.Task[None] | None = None

    async def change(name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        await running.engine.pause()
        await work()
        model[0] = name
        await running.engine.resume()

    async with asyncio.TaskGroup() as group:
        while not all(one.result.steps and one.result.last.finish_reason for one in histories.values()):
            for step in await running.next():
                assert len(step.token_ids) == 1
                histories[step.key].result.steps.append(step)
                histories[step.key].models.append(model[0])
            counts = [len(one.models) for one in histories.values()]
            if left and (changing is None or changing.done()) and min(counts) >= left[0][0]:
                _, name, work = left.pop(0)
                changing = group.create_task(change(name, work))
    return list(histories.values())


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Any]:
    """Return Hugging Face's models of the two checkpoints."""
    import torch
    from transformers import AutoModelForCausalLM

    return {name: AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32) for name in ("moe", "moe2")}


def check(history: History, models: Mapping[str, Any]) -> None:
    """Assert that all log probabilities are those of the KV that the history states."""
    np.testing.assert_allclose(history.result.logprobs, history.by_hand(models), atol=TOLERANCE)


def test_requests_with_tokens_keep_old_kv_until_a_forced_flush(
    reloaded: RunningEngine, models: dict[str, Path], references: dict[str, Any]
) -> None:
    """New weights keep old KV and set no mark. A forced flush marks the next token, before which all KV is new."""
    engine = reloaded.engine
    assert engine.reports_recomputed_kv

    async def load() -> None:
        await engine.load_weights(models["moe"])

    async def flush() -> None:
        assert await engine.reset_cache(preempt=True)

    requests = [request_of(number, 300, 60) for number in range(2)]
    histories = reloaded.call(run(reloaded, requests, [(4, "new", load), (20, "new", flush)]))
    reloaded.call(engine.load_weights(models["moe2"]))

    for history in histories:
        assert set(history.models) == {"own", "new"}
        [mark] = history.marks
        assert mark > history.models.index("new")
        check(history, {"own": references["moe2"], "new": references["moe"]})


def test_preempted_requests_find_no_kv_of_older_weights(
    moe: RunningEngine, models: dict[str, Path], references: dict[str, Any]
) -> None:
    """A request that is preempted before or after new weights has KV of one version only.

    A small cache causes the preemptions.
    """

    async def load() -> None:
        await moe.engine.load_weights(models["moe2"])

    requests = [request_of(10 + number, 150, 250) for number in range(8)]
    histories = moe.call(run(moe, requests, [(60, "new", load)]), timeout_s=300.0)
    moe.call(moe.engine.load_weights(models["moe"]))

    marks = [(history, mark) for history in histories for mark in history.marks]
    assert any(history.models[mark] == "new" for history, mark in marks)
    for history in histories:
        check(history, {"own": references["moe"], "new": references["moe2"]})
