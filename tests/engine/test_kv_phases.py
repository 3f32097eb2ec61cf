from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.workers.engines.vllm.kv.config import PREFILL_PARAMS
from rollbus.workers.engines.vllm.kv.files import BlockTransfer, KvFolder, KvPhaseTracker, new_kv_id

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
    assert len(legs) == 0


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
