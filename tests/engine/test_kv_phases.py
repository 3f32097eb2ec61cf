"""Recomputed KV: the marks of the engine equal the KV with which Hugging Face computes the same results."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.kv.config import PREFILL_PARAMS
from rollbus.workers.engines.vllm.kv.files import BlockTransfer, KvFolder, KvPhaseTracker, new_kv_id
from tests.engine.support import prompt
from tests.support.requests import TOLERANCE
from tests.support.vllm_engine import Result, RunningEngine

BLOCK = 32


@dataclass
class Request:
    """A request as vLLM's scheduler has it."""

    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    request_id: str = "r"


@dataclass
class Scheduler:
    """A stand-in for vLLM's scheduler that passes the data of one request to a connector."""

    legs: KvPhaseTracker
    request: Request
    num_computed: int = 0
    is_new: bool = True
    is_preempted: bool = False
    block_ids: list[int] = field(default_factory=list)
    next_block_id: int = 100

    def step(self, num_tokens: int) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Compute `num_tokens` more, in new blocks if they are needed."""
        is_admitted = self.is_new or self.is_preempted
        num_loaded = self.legs.num_to_load(self.request, 0) if is_admitted else 0
        self.num_computed += num_loaded
        before = len(self.block_ids)
        while len(self.block_ids) * BLOCK < self.num_computed + num_tokens:
            self.block_ids.append(self.next_block_id)
            self.next_block_id += 1
        if is_admitted:
            self.legs.admit(self.request, self.block_ids, num_loaded)
        new = SimpleNamespace(req_id="r", num_computed_tokens=self.num_computed)
        added = tuple(self.block_ids) if self.is_preempted else self.block_ids[before:]
        cached = SimpleNamespace(
            req_ids=[] if self.is_new else ["r"],
            resumed_req_ids={"r"} if self.is_preempted else set(),
            new_block_ids=[] if self.is_new else [(added,) if added else None],
            num_computed_tokens=[] if self.is_new else [self.num_computed],
        )
        jobs = self.legs.next_jobs(
            SimpleNamespace(
                scheduled_new_reqs=[new] if self.is_new else [],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": num_tokens},
            )
        )
        self.num_computed += num_tokens
        self.is_new = self.is_preempted = False
        return jobs

    def preempt(self) -> None:
        """Remove all blocks."""
        self.num_computed = 0
        self.block_ids = []
        self.is_preempted = True


@pytest.fixture
def folder(tmp_path: Path) -> KvFolder:
    """Return an empty KV folder."""
    return KvFolder(tmp_path, ttl_s=60)


def stored(folder: KvFolder, tmp_path: Path, num_tokens: int = 96) -> dict[str, Any]:
    """Return the parameters of a decode phase whose KV is in the folder."""
    kv_id = new_kv_id()
    file = folder.file(kv_id, "pp0-tp0")
    file.parent.mkdir()
    file.touch()
    return {"do_remote_prefill": True, "do_remote_decode": False, "kv_id": kv_id, "num_tokens": num_tokens}


@given(
    num_prompt_tokens=st.integers(1, 300),
    splits=st.lists(st.integers(1, 120), max_size=6),
    preempted_at=st.sets(st.integers(0, 5)),
)
def test_the_step_that_completes_a_prompt_stores_its_blocks(
    num_prompt_tokens: int, splits: list[int], preempted_at: set[int]
) -> None:
    """The step that completes a prompt stores its whole blocks, however the prompt is split and preempted."""
    legs = KvPhaseTracker(KvFolder(Path("/nowhere"), ttl_s=1), BLOCK)
    scheduler = Scheduler(legs, Request(num_prompt_tokens, dict(PREFILL_PARAMS)))
    stores: list[BlockTransfer] = []
    for index, size in enumerate(splits):
        # The last prompt token is left for the step below.
        if (size := min(size, num_prompt_tokens - 1 - scheduler.num_computed)) < 1:
            break
        stores += scheduler.step(size)[0]
        if index in preempted_at:
            scheduler.preempt()
    assert stores == []
    stores, loads = scheduler.step(num_prompt_tokens - scheduler.num_computed)
    params = legs.finish(scheduler.request, is_length=True)

    num_blocks = num_prompt_tokens // BLOCK
    assert loads == []
    assert [job.block_ids for job in stores] == ([scheduler.block_ids[:num_blocks]] if num_blocks else [])
    if num_blocks:
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kv_id": stores[0].kv_id,
            "num_tokens": num_blocks * BLOCK,
        }
    else:
        assert params is None
    assert not legs._giving


def test_whole_requests_are_neither_stored_nor_loaded(folder: KvFolder) -> None:
    """The connector ignores a request without parameters, for example a canary."""
    scheduler = Scheduler(KvPhaseTracker(folder, BLOCK), Request(100, None))

    assert scheduler.step(100) == ([], [])
    assert scheduler.legs.finish(scheduler.request, is_length=True) is None


def test_a_prefill_phase_without_a_decode_phase_leaves_no_kv(folder: KvFolder, tmp_path: Path) -> None:
    """If a prefill phase is aborted or its first token ends the request, its KV is deleted immediately."""
    scheduler = Scheduler(KvPhaseTracker(folder, BLOCK), Request(100, dict(PREFILL_PARAMS)))
    (job,), _ = scheduler.step(100)
    file = folder.file(job.kv_id, "pp0-tp0")
    file.parent.mkdir()
    file.touch()

    assert scheduler.legs.finish(scheduler.request, is_length=False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_prompt_tokens", "num_loaded"), [(101, 96), (97, 96), (96, 64), (33, 32), (32, 0)])
def test_whole_blocks_are_loaded_and_a_prompt_token_remains_to_be_computed(
    folder: KvFolder, tmp_path: Path, num_prompt_tokens: int, num_loaded: int
) -> None:
    """Whole blocks are loaded, and at least one prompt token remains to be computed."""
    scheduler = Scheduler(KvPhaseTracker(folder, BLOCK), Request(num_prompt_tokens, stored(folder, tmp_path)))

    assert scheduler.legs.num_to_load(scheduler.request, 0) == num_loaded
    stores, loads = scheduler.step(num_prompt_tokens - num_loaded)
    assert stores == []
    assert [job.block_ids for job in loads] == ([scheduler.block_ids[: num_loaded // BLOCK]] if num_loaded else [])


def test_blocks_in_the_prefix_cache_are_not_loaded(folder: KvFolder, tmp_path: Path) -> None:
    """Blocks that the prefix cache has are not loaded, and the other blocks are loaded to their positions."""
    request = Request(101, stored(folder, tmp_path))
    legs = KvPhaseTracker(folder, BLOCK)

    assert legs.num_to_load(request, 32) == 64
    legs.admit(request, [7, 8, 9, 10], 64)
    _, loads = legs.next_jobs(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
            num_scheduled_tokens={},
        )
    )
    assert [(job.block_ids, job.first_block) for job in loads] == [([8, 9], 1)]


def test_kv_that_need_not_be_loaded_is_deleted(folder: KvFolder, tmp_path: Path) -> None:
    """KV that need not be loaded is deleted."""
    request = Request(101, stored(folder, tmp_path))
    legs = KvPhaseTracker(folder, BLOCK)

    assert legs.num_to_load(request, 96) == 0
    legs.admit(request, [7, 8, 9, 10], 0)
    assert list(tmp_path.iterdir()) == []


def test_a_preempted_decode_phase_computes_its_kv(folder: KvFolder, tmp_path: Path) -> None:
    """KV is loaded only once, because the load removes it. After a preemption, the decode worker computes it."""
    scheduler = Scheduler(KvPhaseTracker(folder, BLOCK), Request(101, stored(folder, tmp_path)))
    _, loads = scheduler.step(5)
    scheduler.preempt()

    assert len(loads) == 1
    assert scheduler.step(101) == ([], [])


def test_the_kv_of_a_decode_phase_that_was_never_scheduled_is_deleted(folder: KvFolder, tmp_path: Path) -> None:
    """The KV of a decode phase that ends before it is scheduled is deleted."""
    legs = KvPhaseTracker(folder, BLOCK)

    assert legs.finish(Request(101, stored(folder, tmp_path)), is_length=False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "params",
    [
        {"kv_id": "../../etc", "num_tokens": 96},
        {"kv_id": "0" * 32 + "/..", "num_tokens": 96},
        {"kv_id": 7, "num_tokens": 96},
        {"num_tokens": 96},
        {"kv_id": "0" * 32, "num_tokens": "96"},
        {"kv_id": "0" * 32, "num_tokens": -5},
    ],
)
def test_forged_kv_parameters_touch_nothing_outside_of_the_folder(
    folder: KvFolder, tmp_path: Path, params: dict[str, Any]
) -> None:
    """Forged parameters of a decode phase touch nothing outside of the folder, and the scheduler continues."""
    scheduler = Scheduler(KvPhaseTracker(folder, BLOCK), Request(101, {"do_remote_prefill": True, **params}))
    _, loads = scheduler.step(101 - scheduler.legs.num_to_load(scheduler.request, 0))
    scheduler.legs.finish(scheduler.request, is_length=True)

    for job in loads:
        with pytest.raises(ValueError, match="invalid KV id"):
            folder.file(job.kv_id, "pp0-tp0")


# Recomputed KV: the marks of the engine equal the KV with which Hugging Face computes the same results.


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
