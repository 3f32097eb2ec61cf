"""The expert counts that workers should report, computed from the rows of a client, and a wait for these reports."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

import rollbus
from rollbus import ExpertAnswers, Generation
from rollbus.bus.protocol.telemetry.experts import ExpertWindow
from rollbus.schemas.rows import Rows
from tests.support.patience import SOON_S

ASK_AGAIN_S = 0.3
"""Seconds between two reads; workers answer 20 reads per second."""


def counted(rows: Iterable[Rows], num_experts: int) -> npt.NDArray[np.int64]:
    """Return how often each expert occurs in each layer."""
    whole = np.concatenate(list(rows))
    return np.array([np.bincount(whole[:, i].ravel(), minlength=num_experts) for i in range(whole.shape[1])])


def planes_of(results: Iterable[Generation], num_experts: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the expert counts of uncached prompt tokens and of generated tokens; each `start` must be 0."""
    prompts, generated = [], []
    for result in results:
        assert result.start == 0
        prompts.append(result.routed_experts[result.cached_tokens or 0 : result.prompt_len])
        generated.append(result.routed_experts[result.prompt_len :])
    return {"prompt": counted(prompts, num_experts), "generated": counted(generated, num_experts)}


async def asked_until(rb: rollbus.Client, is_met: Callable[[ExpertWindow], object], **question: Any) -> ExpertAnswers:
    """Read all counts until the answer meets the condition: a read covers only intervals that have ended."""
    answers: ExpertAnswers | None = None
    try:
        async with asyncio.timeout(SOON_S):
            while True:
                answers = await rb.fleet.experts(**{"last_s": None, **question})
                if answers.window is not None and is_met(answers.window):
                    return answers
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        raise AssertionError(f"the workers' answers stay {answers}") from None
