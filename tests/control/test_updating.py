"""New weights and adapters: the versions of tokens, and failures."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollbus
from rollbus import ErrorCode, Generation, RequestError
from rollbus.frontend.cli.exits import ExitCode, exit_code_of_result
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest
from rollbus.schemas.presence import LoraInfo, WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.sources import WeightSources
from tests.cli.support import run_rollbus
from tests.control.support import ask, assert_same, folders, serving_here, start_here, write_adapter
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import synthetic_worker, until_state, until_worker
from tests.support.invariants import check_stream
from tests.support.requests import incomplete, start_stream


@pytest.mark.proves("P16")
async def test_weights_change_while_requests_stream(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Streams on two workers finish, first with tokens of version 1 and then only with tokens of version 2.

    A third worker that starts later from the old weights serves version 2, with the results of a worker that was
    started on the new weights.
    """
    one, two = folders(tmp_path)
    async with serving_here(nats_url, fleet, one, 2, step_s=0.04) as rb:
        before = await rb.complete(ask())
        async with asyncio.TaskGroup() as tasks:
            streams = [await start_stream(tasks, rb, ask(i, max_tokens=200)) for i in range(6)]
            ended = await run_rollbus(
                nats_url, fleet, "update-weights", str(two), "--version", "2", "--mode", "keep", "--json"
            )
        after = await rb.complete(ask())
        async with start_here(nats_url, fleet, "w2", one):
            await rb.fleet.wait_for_workers(3)
            await rb.fleet.drain(["w0", "w1"])
            late = await rb.complete(ask())
    async with serving_here(nats_url, f"{fleet}-fresh", two, 1) as other:
        fresh = await other.complete(ask())

    told = json.loads(ended.stdout)
    assert (ended.code, ended.stderr, told["complete"]) == (0, "", True)
    assert [(worker["worker"], worker["weight_version"]) for worker in told["workers"]] == [("w0", 2), ("w1", 2)]
    for stream in streams:
        check_stream(stream.chunks, stream.request)
        assert len(stream.versions) == 200
        assert set(stream.versions) == {1, 2}
        assert stream.versions == sorted(stream.versions)
    assert {*before.weight_versions.tolist()} == {1}
    assert {*after.weight_versions.tolist()} == {*late.weight_versions.tolist()} == {2}
    assert late.worker_ids == ("w2",)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    assert_same(after, fresh)
    assert_same(late, fresh)


@pytest.mark.proves("P19")
async def test_an_engine_with_wrong_routing_after_an_update_serves_no_requests(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An engine that reports success but routes wrongly serves nothing: its canary differs from the others."""
    one, two = folders(tmp_path)
    lies: dict[str, Any] = {"faults": {"load": "wrong_experts", "good_loads": 1}}
    async with serving_here(nats_url, fleet, one, 2) as rb, start_here(nats_url, fleet, "w2", one, **lies):
        await rb.fleet.wait_for_workers(3)
        ledger = (await incomplete(rb.fleet.update_weights(str(two), version=2))).ledger
        liar = await until_worker(rb, "w2", WorkerState.POISONED)

    assert exit_code_of_result(ledger) == ExitCode.PARTIAL
    assert (set(ledger.applied), set(ledger.failed)) == ({"w0", "w1"}, {"w2"})
    assert ledger.failed["w2"].error.code is ControlCode.NOT_VERIFIED
    assert liar.last_error


# LoRA adapters.


async def with_adapter(rb: rollbus.Client) -> Generation:
    """Return the generation of a prompt with the adapter `math`."""
    return await rb.complete(ask(lora="math"))


def tokens(generation: Generation) -> list[int]:
    """Return the token ids of a generation."""
    return [int(token_id) for token_id in generation.token_ids]


def lora_versions(generation: Generation) -> set[int]:
    """Return the adapter versions of a generation's tokens."""
    return set() if generation.lora_versions is None else {int(version) for version in generation.lora_versions}


async def test_an_adapter_is_loaded_replaced_kept_over_new_weights_and_unloaded(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An adapter is loaded, replaced under its name, kept over new weights, loaded by a late worker and unloaded.

    Each token has the version of its adapter and of its weights.
    """
    one, two = folders(tmp_path / "root")
    first = write_adapter(tmp_path / "root" / "first")
    second = write_adapter(tmp_path / "mine" / "second", module="model.layers.0.mlp.down_proj")
    async with serving_here(nats_url, fleet, one, 1) as rb:
        plain = await rb.complete(ask())
        await rb.fleet.load_lora("math", str(first))
        results = [await with_adapter(rb)]
        await rb.fleet.load_lora("math", str(second), upload=True, version=7)
        results.append(await with_adapter(rb))
        await rb.fleet.update_weights(str(two), version=2)
        results.append(await with_adapter(rb))
        async with start_here(nats_url, fleet, "w1", one):
            await rb.fleet.wait_for_workers(2)
            late = await until_worker(rb, "w1", lambda worker: worker.loras)
        await rb.fleet.unload_lora("math")
        before = (await rb.fleet.state()).desired["m"]
        with pytest.raises(ControlError, match="'unknown' is not loaded"):
            await rb.fleet.unload_lora("unknown")
        with pytest.raises(InvalidRequest, match="'m', which is the name of a model"):
            await rb.fleet.load_lora("m", str(first))
        after = (await rb.fleet.state()).desired["m"]
        with pytest.raises(RequestError) as caught:
            await with_adapter(rb)

    assert after == before
    assert [lora_versions(result) for result in results] == [{1}, {7}, {7}]
    assert [set(result.weight_versions.tolist()) for result in results] == [{1}, {1}, {2}]
    assert plain.lora_versions is None
    assert len({tuple(tokens(result)) for result in (plain, *results)}) == 4
    assert late.loras == (LoraInfo(name="math", version=7),)
    assert caught.value.code is ErrorCode.UNSUPPORTED


# Updates that switch as soon as some workers have staged the weights.


class OneAtOnce:
    """A store that serves the first worker immediately, and other workers only after `gate` is set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gate = asyncio.Event()
        self._first: WeightSources | None = None

    async def checkpoint(self, sources: WeightSources, report: Callable[[str], None]) -> Path:
        """Return the folder as `WeightSources.checkpoint` does."""
        report("fetching")
        self._first = self._first or sources
        if sources is not self._first:
            await self.gate.wait()
        return self._folder


async def test_an_update_with_min_staged_waits_only_for_that_number_of_workers(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update with `min_staged` waits only for that number of workers.

    The other workers serve nothing after the record, are in the ledger as not awaited, and load the weights later.
    """
    store = OneAtOnce(write_checkpoint(tmp_path / "2", fill=2))

    async def checkpoint(self: WeightSources, _source: WeightSource, report: Callable[[str], None]) -> Path:
        return await store.checkpoint(self, report)

    monkeypatch.setattr(WeightSources, "checkpoint", checkpoint)
    async with (
        synthetic_worker(nats_url, fleet, worker_id="a", weight_version=1),
        synthetic_worker(nats_url, fleet, worker_id="b", weight_version=1),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(InvalidRequest, match="min_staged"):
            await rb.fleet.update_weights(objects="bucket/2", version=2, min_staged=3)
        assert {worker.weight_version for worker in (await rb.fleet.state()).workers} == {1}
        ledger = await rb.fleet.update_weights(objects="bucket/2", version=2, min_staged=1)

        [staged] = ledger.applied
        [behind] = ledger.not_awaited
        assert ledger.is_complete
        assert exit_code_of_result(ledger) is ExitCode.OK
        assert {staged, behind} == {"a", "b"}
        assert behind in (ledger.late | ledger.missing)
        timing = ledger.applied[staged].timing
        assert ledger.paused_s == pytest.approx(timing.paused_s, abs=0.001)
        state = await until_state(
            rb, lambda state: {worker.worker: worker.staging is not None for worker in state.workers}[behind]
        )
        told = {worker.worker: worker for worker in state.workers}
        assert (told[behind].state, told[behind].weight_version) == (WorkerState.UPDATING, 1)
        assert (told[staged].state, told[staged].weight_version) == (WorkerState.SERVING, 2)

        store.gate.set()
        await rb.fleet.wait_for_workers(2)
        assert {worker.weight_version for worker in (await rb.fleet.state()).workers} == {2}
