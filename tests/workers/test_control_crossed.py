"""Crossing commands: a command that replaces another, waits for another, or arrives after its work has begun."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.acks import AckStatus
from rollbus.schemas.errors import ControlCode, ControlError, EngineDead, ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control import reconciler
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.requests.publisher import OutboundPublisher
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_control import hand_controller
from tests.support.hand_worker import running
from tests.support.requests import endless, short
from tests.support.waits import until_true
from tests.workers.support import SLOW, StartControlled

SLOW_LOAD = SyntheticConfig.from_args({"step_s": 0.01, "max_model_len": 10_000_000, "faults": {"load_s": 1.5}})


def fields_of(root: Path) -> dict[str, Any]:
    """Return the settings of a worker on weights of version 1, which may load folders below `root`."""
    own = write_checkpoint(root / "1", fill=1)
    return {"weight_roots": (str(root),), "model_path": str(own), "weight_version": 1, "prove_reload": False}


def checkpoint(root: Path, fill: int) -> dict[str, str]:
    """Write a checkpoint in which each byte is `fill`, and return its source."""
    return {"path": str(write_checkpoint(root / str(fill), fill=fill))}


async def test_a_later_update_makes_a_waiting_update_stale(controlled_worker: StartControlled, tmp_path: Path) -> None:
    """If requests in flight delay an update, a later update does not wait: the earlier update becomes stale at once."""
    async with controlled_worker(**fields_of(tmp_path)) as (client, boss, *_):
        await client.begin(endless("r"))
        waiting = await boss.command("update_weights", source=checkpoint(tmp_path, 2), version=2, mode="wait")
        await boss.until(lambda: any(ack.stage == "pausing" for ack in boss.acks(waiting)))
        applied = await boss.applied("update_weights", source=checkpoint(tmp_path, 3), version=3, mode="keep")
        await client.until(lambda: client.chunks["r"][-1].weight_version == 3)
        await client.until_serving("w")

        assert [ack.status for ack in boss.finals(waiting)] == [AckStatus.STALE]
        assert applied.seconds < 30
        assert {chunk.weight_version for chunk in client.chunks["r"]} == {1, 3}
        assert not client.ended("r")


async def test_a_later_update_waits_until_a_load_has_finished(
    controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """A later update waits until a load has finished. Streams continue through both, without half-written weights."""
    async with controlled_worker(config=SLOW_LOAD, **fields_of(tmp_path)) as (client, boss, *_):
        await client.begin(endless("r"))
        first = await boss.command("update_weights", source=checkpoint(tmp_path, 2), version=2)
        await boss.until(lambda: any(ack.stage == "loading" for ack in boss.acks(first)))
        late = await boss.command("resume", timeout_s=0.1)
        await boss.applied("update_weights", source=checkpoint(tmp_path, 3), version=3)
        await client.until(lambda: client.chunks["r"][-1].weight_version == 3)
        await client.until_serving("w")

        [resumed] = boss.finals(late)
        assert (resumed.error.code, "the worker is updating" in resumed.error.message) == (ControlCode.TIMEOUT, True)
        assert [ack.status for ack in boss.finals(first)] == [AckStatus.STALE]
        versions = [chunk.weight_version for chunk in client.chunks["r"]]
        assert versions == sorted(versions)
        assert (versions[0], versions[-1]) == (1, 3)
        assert not client.ended("r")


async def test_a_late_command_message_gets_acks_with_the_progress(
    controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """If a worker has begun to apply the desired state, a later command message gets acks with its progress."""
    async with controlled_worker(**fields_of(tmp_path)) as (client, boss, *_):
        await client.begin(endless("r"))
        epoch = await boss.record("pause", id="p", mode="wait")
        await client.until_state("w", WorkerState.UPDATING)
        await boss.command("pause", id="p", mode="wait", epoch=epoch)
        await boss.until(lambda: any(ack.stage == "pausing" for ack in boss.acks("p")))
        await boss.applied("resume")

        assert [ack.status for ack in boss.finals("p")] == [AckStatus.STALE]


async def test_a_drain_and_a_sleep_wait_for_an_update(controlled_worker: StartControlled, tmp_path: Path) -> None:
    """A drain and a sleep are applied after an update, in the recorded order.

    After the wake, the worker serves the new weights.
    """
    async with controlled_worker(config=SLOW_LOAD, **fields_of(tmp_path)) as (client, boss, *_):
        update = await boss.command("update_weights", source=checkpoint(tmp_path, 2), version=2)
        await boss.until(lambda: any(ack.stage == "loading" for ack in boss.acks(update)))
        drain, sleep = await boss.command("drain", workers=["w"]), await boss.command("sleep", level=2)
        for command in (update, sleep, drain):
            assert (await boss.final(command)).status is AckStatus.APPLIED
        await client.until_state("w", WorkerState.DRAINED)
        await boss.applied("resume", workers=["w"])
        await client.until_state("w", WorkerState.ASLEEP)
        third = await boss.applied("update_weights", source=checkpoint(tmp_path, 3), version=3)
        await client.until_state("w", WorkerState.ASLEEP)
        await boss.applied("wake")
        await client.complete(short("r"))

        assert third.weight_version == 3
        assert {chunk.weight_version for chunk in client.chunks["r"]} == {3}


async def test_a_worker_that_starts_during_a_transfer_cannot_apply_its_finish(
    nats_url: str, fleet: str, controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """A worker that starts during a transfer serves its start weights until the finish, which it cannot apply.

    An update makes it serve again.
    """
    fields = fields_of(tmp_path)
    chunk = base64.b64encode((write_checkpoint(tmp_path / "2", fill=2) / "model.safetensors").read_bytes()).decode()
    async with controlled_worker(worker_id="a", **fields) as (client, boss, *_):
        await boss.applied("start_weight_update")
        async with synthetic_worker(nats_url, fleet, worker_id="b", config=SLOW, **fields):
            await client.until_serving("b")
            part = await boss.command("update_weight_chunk", info={"data": chunk})
            await boss.until(lambda: len(boss.finals(part)) == 2)
            finish = await boss.command("finish_weight_update", version=2)
            await boss.until(lambda: len(boss.finals(finish)) == 2)
            await client.until_state("b", WorkerState.WAITING_FOR_WEIGHTS)
            await client.until_state("a", WorkerState.SERVING)
            update = await boss.command("update_weights", source=checkpoint(tmp_path, 3), version=3)
            await boss.until(lambda: len(boss.finals(update)) == 2)
            await client.until_serving("a", "b")

        said = {command: {ack.worker: ack.status for ack in boss.finals(command)} for command in (part, finish, update)}
        applied, failed = AckStatus.APPLIED, AckStatus.FAILED
        assert said[part] == said[finish] == {"a": applied, "b": failed}
        assert said[update] == {"a": applied, "b": applied}


class StubbornEngine(SyntheticEngine):
    """An engine that can refuse to pause or resume."""

    refuses: str | None = None

    async def pause(self) -> None:
        """Pause, or refuse."""
        self._check("pause")
        await super().pause()

    async def resume(self) -> None:
        """Resume, or refuse."""
        self._check("resume")
        await super().resume()

    def _check(self, what: str) -> None:
        if self.refuses == what:
            raise ControlError(ControlCode.ENGINE_ERROR, "not now")


@pytest.mark.parametrize("refuses", ["pause", "resume"])
async def test_an_engine_that_refuses_to_pause_or_resume_counts_as_dead(
    refuses: str, nats_url: str, fleet: str
) -> None:
    """If the engine refuses to pause or resume, the worker ends its requests as `engine_dead` and exits."""
    engine = StubbornEngine(SLOW)
    async with hand_client(nats_url, fleet) as client, hand_controller(nats_url, fleet) as boss:
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
            async with running(nats_url, fleet, engine):
                await client.until_serving("w")
                await client.begin(endless("r"))
                if refuses == "resume":
                    await boss.applied("pause")
                engine.refuses = refuses
                await boss.command(refuses)
                await asyncio.Event().wait()  # until the worker's end cancels this
        assert caught.group_contains(EngineDead, match="the engine did not pause or resume: not now")
        await client.until_ended("r")
        assert client.error_of("r") == ErrorCode.ENGINE_DEAD


async def test_a_resume_during_the_last_frames_of_a_pause_is_applied_next(
    controlled_worker: StartControlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a resume arrives while the worker sends the last frames of a pause, the worker applies it next."""
    is_leaving, may_leave = asyncio.Event(), asyncio.Event()

    async def leave(_self: OutboundPublisher) -> None:
        is_leaving.set()
        await may_leave.wait()

    monkeypatch.setattr(reconciler, "CUT_S", 60.0)
    async with controlled_worker() as (client, boss, worker, _):
        monkeypatch.setattr(OutboundPublisher, "wait_sent", leave)
        pause = await boss.command("pause")
        await is_leaving.wait()
        resume = await boss.command("resume")
        await until_true(lambda: worker.debug_state()["epoch"] == 2)
        may_leave.set()

        assert (await boss.final(resume)).status is AckStatus.APPLIED
        assert (await boss.final(pause)).status is AckStatus.STALE
        await client.until_serving("w")
