"""Sources are staged beside the reconciler, so other parts of the desired state are applied meanwhile."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollbus.schemas.acks import AckStatus
from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.control import acks, reconciler
from rollbus.workers.engines.synthetic.config import SyntheticConfig, SyntheticFaults
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_control import hand_controller
from tests.support.requests import endless, short
from tests.workers.control_support import rig, update
from tests.workers.support import SLOW, StartControlled

BASE = "bucket/versions"


class Store:
    """A stand-in for the object store with a gate for each source: `BASE/<name>` is the checkpoint `root/<name>`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.gates: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []
        """The requested sources."""
        self.cancelled: list[str] = []
        self.is_away = False

    def add(self, name: str, fill: int, *, is_open: bool = False) -> dict[str, str]:
        """Write a checkpoint, and return its source."""
        write_checkpoint(self._root / name, fill=fill)
        self.gates[name] = asyncio.Event()
        if is_open:
            self.gates[name].set()
        return {"objects": f"{BASE}/{name}"}

    async def checkpoint(self, source: WeightSource, report: Callable[[str], None]) -> Path:
        """Return the checkpoint as `WeightSources.checkpoint` does."""
        name = str(source.objects).rpartition("/")[2]
        self.calls.append(name)
        report("fetching")
        try:
            await self.gates[name].wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if self.is_away:
            raise ControlError(ControlCode.STORAGE, "it is away")
        return self._root / name


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the store that all workers of the test read."""
    made = Store(tmp_path)

    async def checkpoint(_self: WeightSources, source: WeightSource, report: Callable[[str], None]) -> Path:
        return await made.checkpoint(source, report)

    monkeypatch.setattr(WeightSources, "checkpoint", checkpoint)
    return made


async def test_a_pause_is_applied_while_weights_are_staged(controlled_worker: StartControlled, store: Store) -> None:
    """Pause, drain and resume do not wait for a download.

    A worker with older weights than the recorded ones accepts no requests.
    """
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        await client.begin(endless("r"))
        update = await boss.command("update_weights", version=2, source=store.add("2", 2))
        await boss.until(lambda: any(ack.stage == "fetching" for ack in boss.acks(update)))
        await client.until_state("w", WorkerState.UPDATING)
        count = len(client.chunks["r"])
        await client.until(lambda: len(client.chunks["r"]) > count + 20)
        await boss.applied("pause", mode="keep")
        await client.until_state("w", WorkerState.PAUSED)
        await boss.applied("resume")
        await client.until_state("w", WorkerState.UPDATING)
        await boss.applied("drain", workers=["w"])
        await client.until_state("w", WorkerState.DRAINED)
        await boss.applied("resume", workers=["w"])
        assert not boss.finals(update)
        assert client.presences["w"].weight_version == 1

        store.gates["2"].set()
        applied = await boss.final(update)
        await client.complete(short("s"))

        assert (applied.status, applied.weight_version) == (AckStatus.APPLIED, 2)
        assert {chunk.weight_version for chunk in client.chunks["s"]} == {2}
        assert [ack.progress.source for ack in boss.acks(update) if ack.progress is not None][:1] == [
            f"objects:{BASE}/2"
        ]


async def test_a_newer_update_cancels_an_older_staging(controlled_worker: StartControlled, store: Store) -> None:
    """A newer update makes an older update stale, cancels its download, and its weights are never loaded."""
    async with controlled_worker(weight_version=1) as (client, boss, _, engine):
        older = await boss.command("update_weights", version=2, source=store.add("2", 2))
        await boss.until(lambda: store.calls == ["2"])
        newer = await boss.command("update_weights", version=3, source=store.add("3", 3))
        await boss.until(lambda: store.calls == ["2", "3"])
        assert (await boss.final(older)).status is AckStatus.STALE
        assert store.cancelled == ["2"]
        loads = engine._num_loads
        store.gates["2"].set()
        store.gates["3"].set()
        assert (await boss.final(newer)).weight_version == 3
        await client.until_serving("w")

        assert engine._num_loads == loads + 1
        assert client.presences["w"].weight_version == 3


async def test_an_update_continues_the_staging_of_a_check_with_the_same_source(
    controlled_worker: StartControlled, store: Store
) -> None:
    """An update continues the staging of a check with the same source. Both commands get their acks afterwards."""
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        source = store.add("2", 2)
        check = await boss.command("check_weights", source=source)
        await boss.until(lambda: any(ack.stage == "fetching" for ack in boss.acks(check)))
        assert client.presences["w"].state is WorkerState.SERVING
        update = await boss.command("update_weights", version=2, source=source)
        await client.until_state("w", WorkerState.UPDATING)
        assert store.calls == ["2"]
        store.gates["2"].set()

        assert (await boss.final(check)).status is AckStatus.APPLIED
        assert (await boss.final(update)).weight_version == 2
        # The source is staged once. The switch requests it again and finds it on the machine.
        assert store.calls == ["2", "2"]
        assert store.cancelled == []


async def test_a_newer_check_makes_older_checks_stale(controlled_worker: StartControlled, store: Store) -> None:
    """A newer check makes older checks stale, also those that still wait, and ends their staging.

    Checks of the same source share one staging.
    """
    async with controlled_worker(weight_version=1) as (_, boss, *_):
        first = await boss.command("check_weights", source=store.add("2", 2))
        await boss.until(lambda: store.calls == ["2"])
        newer = store.add("3", 3)
        checks = [await boss.command("check_weights", source=newer) for _ in range(2)]
        stale = await boss.final(first)
        await boss.until(lambda: store.calls == ["2", "3"])
        newest = await boss.command("check_weights", source=store.add("4", 4, is_open=True))

        assert (await boss.final(newest)).status is AckStatus.APPLIED
        assert [(await boss.final(check)).status for check in checks] == [AckStatus.STALE] * 2
        assert store.cancelled == ["2", "3"]
        assert stale.status is AckStatus.STALE
        assert stale.error.message == f"a later check of objects:{BASE}/3 has replaced this check"


async def test_an_update_does_not_wait_for_the_download_of_a_check(
    controlled_worker: StartControlled, store: Store
) -> None:
    """An update does not wait for the download of a check with another source. The check continues afterwards."""
    async with controlled_worker(weight_version=1) as (_, boss, *_):
        check = await boss.command("check_weights", source=store.add("3", 3))
        await boss.until(lambda: store.calls == ["3"])
        await boss.applied("update_weights", version=2, source=store.add("2", 2, is_open=True))
        assert store.cancelled == ["3"]
        assert not boss.finals(check)
        store.gates["3"].set()
        assert (await boss.final(check)).status is AckStatus.APPLIED


async def test_a_late_worker_serves_no_requests_before_its_weights_are_staged(
    nats_url: str, fleet: str, store: Store
) -> None:
    """A worker that starts later stages the recorded weights before it serves. Pauses are applied meanwhile."""
    async with hand_client(nats_url, fleet) as client, hand_controller(nats_url, fleet) as boss:
        await boss.record("update_weights", version=5, source=store.add("5", 5))
        async with synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW):
            await client.until(lambda: store.calls)
            await client.until(lambda: client.presences["w"].staging is not None)
            assert client.presences["w"].state is WorkerState.UPDATING
            await client.enqueue(short("r"))
            await boss.applied("pause")
            await client.until_state("w", WorkerState.PAUSED)
            await boss.applied("resume")
            assert not client.chunks["r"]
            store.gates["5"].set()
            await client.until_ended("r")

        assert {chunk.weight_version for chunk in client.chunks["r"]} == {5}


async def test_a_staging_that_fails_is_tried_again(
    controlled_worker: StartControlled, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is outdated while the store is away, and loads the recorded weights when the store is back."""
    monkeypatch.setattr(reconciler, "FETCH_RETRY_S", 0.0)
    store.is_away = True
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        failed = await boss.do("update_weights", version=2, source=store.add("2", 2, is_open=True))
        assert failed.error.code is ControlCode.STORAGE
        await client.until_state("w", WorkerState.OUTDATED)
        store.is_away = False
        await client.until_serving("w")

        assert client.presences["w"].weight_version == 2


async def test_a_command_gets_one_ack_for_each_stage(
    controlled_worker: StartControlled, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command gets one ack for each stage. A check that waits for its source reports that stage."""
    monkeypatch.setattr(acks, "PROGRESS_S", 0.0)
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        check = await boss.command("check_weights", source=store.add("2", 2))
        await boss.until(lambda: any(ack.progress is not None for ack in boss.acks(check)))
        await client.until(lambda: client.presences["w"].staging is not None)
        store.gates["2"].set()
        done = await boss.final(check)
        await client.until(lambda: client.presences["w"].staging is None)

        stages = [ack.stage for ack in boss.acks(check) if ack.progress is not None]
        assert stages[-1] == "fetching"
        assert done.timing.paused_s == 0.0


@pytest.mark.proves("P16")
async def test_the_times_of_an_update_add_up(controlled_worker: StartControlled, store: Store) -> None:
    """The times of an update add up.

    The applied ack leaves when the engine resumes, so no token of the old weights follows it.
    """
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        await client.begin(endless("r"))
        source = store.add("2", 2)
        check = await boss.command("check_weights", source=source)
        await boss.until(lambda: store.calls)
        await asyncio.sleep(0.01)  # staging then takes a measurable time
        store.gates["2"].set()
        await boss.final(check)
        applied = await boss.applied("update_weights", version=2, source=source)
        await client.until(lambda: client.chunks["r"][-1].weight_version == 2)
        timing = applied.timing

        assert timing.staged_s > 0
        assert timing.loaded_s + timing.canary_s <= timing.paused_s + 0.002
        assert timing.waited_s + timing.paused_s <= applied.seconds + 0.002
        told = boss.said[boss.said.index(applied) :]
        versions = {chunk.weight_version for frame in told for chunk in getattr(frame, "chunks", ())}
        assert versions <= {2}
        assert (await boss.applied("update_weights", version=2, source=source, allow_rollback=True)).timing is None


async def test_an_update_during_a_pause_is_acked_when_the_worker_is_paused_again(
    controlled_worker: StartControlled, store: Store
) -> None:
    """During a pause, the engine does not resume after an update. The ack leaves when the worker is paused again."""
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        await client.begin(endless("r"))
        await boss.applied("pause", mode="keep")
        await boss.applied("update_weights", version=2, source=store.add("2", 2, is_open=True))
        await client.until_state("w", WorkerState.PAUSED)
        assert {chunk.weight_version for chunk in client.chunks["r"]} == {1}
        await boss.applied("resume")
        await client.until(lambda: client.chunks["r"][-1].weight_version == 2)


async def test_a_poisoned_worker_that_stages_new_weights_is_updating(
    controlled_worker: StartControlled, store: Store
) -> None:
    """A poisoned worker that stages new weights is `updating`, so requests may wait for it: it serves afterwards."""
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        await boss.applied("fence", reason="for the test")
        await client.until_state("w", WorkerState.POISONED)
        update = await boss.command("update_weights", version=2, source=store.add("2", 2))
        await client.until_state("w", WorkerState.UPDATING)
        assert not boss.finals(update)
        store.gates["2"].set()
        await boss.final(update)
        await client.until_serving("w")

        assert client.presences["w"].weight_version == 2


async def test_an_adapter_is_staged_while_the_worker_serves(
    controlled_worker: StartControlled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests run during the download of an adapter, which is then loaded.

    An adapter that cannot be fetched changes nothing.
    """
    gate = asyncio.Event()

    async def adapter(
        _self: WeightSources, source: WeightSource, report: Callable[[str], None], **_fields: object
    ) -> Path:
        report("fetching")
        await gate.wait()
        if str(source.objects).endswith("bad"):
            raise ControlError(ControlCode.BAD_SOURCE, "it is bad")
        return tmp_path

    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    monkeypatch.setattr(WeightSources, "adapter", adapter)
    async with controlled_worker(weight_version=1) as (client, boss, *_):
        load = await boss.command("load_lora", name="a", version=3, source={"objects": "bucket/good"})
        await boss.until(lambda: any(ack.stage == "fetching" for ack in boss.acks(load)))
        await client.complete(short("r"))
        assert client.presences["w"].state is WorkerState.SERVING
        gate.set()
        assert (await boss.final(load)).status is AckStatus.APPLIED
        failed = await boss.do("load_lora", name="b", version=3, source={"objects": "bucket/bad"})
        await client.until(lambda: client.presences["w"].epoch == failed.epoch)

        assert (failed.status, client.presences["w"].state) == (AckStatus.FAILED, WorkerState.SERVING)
        assert [(lora.name, lora.version) for lora in client.presences["w"].loras] == [("a", 3)]


# Checkpoints and adapters whose files change before or during a load.


LONG = 60_000
"""The tokens of a request that does not end by itself in a test."""


@pytest.mark.parametrize("change", ["rewritten", "deleted"])
async def test_files_that_change_during_a_load_poison_the_weights(tmp_path: Path, change: str) -> None:
    """Files that change during a load make the weights invalid, also if their size does not change.

    The content that the engine read is unknown. An undisturbed load makes the worker serve again.
    """

    class Disturbed(SyntheticEngine):
        async def load_weights(self, path: Path) -> None:
            """Load, while another program writes to the folder of version 2."""
            await super().load_weights(path)
            file = path / "model.safetensors"
            if path.name == "2" and change == "deleted":
                file.unlink()
            elif path.name == "2":
                file.write_bytes(file.read_bytes()[:-1] + b"?")
                os.utime(file, ns=(0, 0))  # a different time, whatever the resolution of the disk's clock

    config = SyntheticConfig(faults=SyntheticFaults(load_s=0.05))
    async with rig(tmp_path, config, engine=Disturbed) as worker:
        await worker.begin("r", LONG)
        path = worker.checkpoint("2", 2)
        with pytest.raises(ControlError, match=f"{path}.* changed during the load") as caught:
            await worker.weights.update(update(path, 2), worker.report)
        assert caught.value.code is ControlCode.HALF_WRITTEN
        assert (*worker.standing, worker.weights.problem) == (1, True, caught.value.message)
        end = worker.end("r")
        assert end.error.code is ErrorCode.WORKER_FENCED

        await worker.weights.update(update(worker.checkpoint("3", 3), 3, mode="wait"), worker.report)
        await worker.flow.resume()
        assert worker.standing == (3, False)
        await worker.generate("s")
