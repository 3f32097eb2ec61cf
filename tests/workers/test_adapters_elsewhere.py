"""The choice of a worker for a request with an adapter, if not all workers have the adapter."""

from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus.schemas.errors import ErrorCode, RequestRejected, RequestTimeout
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.requests import admission
from tests.control.support import write_adapter, write_checkpoint
from tests.support.fleet import StartServed, synthetic_worker
from tests.support.fleet_states import until_state, worker_of
from tests.support.hand_worker import request
from tests.support.invariants import observing

FAILS = SyntheticConfig.from_args({"faults": {"load_lora": True}})


async def test_a_worker_without_the_adapter_leaves_its_requests_to_other_workers(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two workers failed to load an adapter, the other worker serves all its requests.

    This holds for requests from the queue and of sessions. Repeated deliveries do not make a request a poison request,
    and a request with an unknown adapter is rejected.
    """
    monkeypatch.setattr(admission, "ADAPTER_S", 0.002)
    one = write_checkpoint(tmp_path / "one", seed=1)
    adapter = write_adapter(tmp_path / "adapter")
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(one), "model": "m"}
    async with (
        observing(nats_url, fleet) as observer,
        one_worker(worker_id="lacks", config=FAILS, **fields) as (rb, lacks, _),
    ):
        async with synthetic_worker(nats_url, fleet, worker_id="has", **fields):
            await rb.fleet.wait_for_workers(2)
            with pytest.raises(rollbus.CommandIncomplete) as partial:
                await rb.fleet.load_lora("math", adapter)
            wanted = [
                request(request_id=f"r{i}", lora="math", session_id=f"s{i}" if i % 2 else None) for i in range(40)
            ]
            results = [generation async for generation in rb.complete_many(wanted)]
            state = await until_state(rb, lambda state: worker_of(state, "lacks").last_error)
            with pytest.raises(RequestRejected, match="lora 'maths' is not loaded") as unknown:
                await rb.complete(request(lora="maths"))
        with pytest.raises(RequestTimeout, match="the request waits for a worker with the adapter 'math'"):
            await rb.complete(request(lora="math", timeout_s=0.5))
        await observer.check_at_rest()

    assert str(worker_of(state, "lacks").last_error).startswith("adapter math differs from the desired state: ")
    assert list(partial.value.ledger.failed) == ["lacks"]
    assert {result.worker_ids for result in results} == {("has",)}
    assert lacks.stats().intake.too_new > 0
    assert unknown.value.code is ErrorCode.UNSUPPORTED


async def test_a_worker_without_the_adapter_of_the_base_does_not_serve_the_base(
    nats_url: str, fleet: str, one_worker: StartServed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one of two workers failed to load an adapter under the model's name, the other worker serves all requests.

    New weights end the adapter, and both workers serve again.
    """
    monkeypatch.setattr(admission, "ADAPTER_S", 0.002)
    one, two = write_checkpoint(tmp_path / "one", seed=1), write_checkpoint(tmp_path / "two", seed=2)
    adapter = write_adapter(tmp_path / "adapter")
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(one), "model": "m"}
    async with (
        one_worker(worker_id="lacks", config=FAILS, **fields) as (rb, _, _),
        synthetic_worker(nats_url, fleet, worker_id="has", **fields),
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(rollbus.CommandIncomplete) as partial:
            await rb.fleet.load_lora("m", adapter, version=2, for_base=True)
        wanted = [request(request_id=f"r{i}", session_id=f"s{i}" if i % 2 else None) for i in range(40)]
        results = [generation async for generation in rb.complete_many(wanted)]
        await rb.fleet.update_weights(two, version=3)
        wanted = [request(request_id=f"after{i}", session_id=f"s{i}") for i in range(40)]
        after = [generation async for generation in rb.complete_many(wanted)]

    assert list(partial.value.ledger.failed) == ["lacks"]
    assert {result.worker_ids for result in results} == {("has",)}
    assert all(result.lora_versions is not None and set(result.lora_versions) == {2} for result in results)
    assert {result.worker_ids for result in after} == {("has",), ("lacks",)}
    assert all(result.lora_versions is None for result in after)
