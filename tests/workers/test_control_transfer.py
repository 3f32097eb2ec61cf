"""Commands during an open transfer of weights: no step runs on half-written weights, and all commands get acks."""

import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.acks import AckStatus
from rollbus.schemas.errors import ControlCode, ErrorCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.worker import Worker
from tests.support.checkpoints import write_adapter, write_checkpoint
from tests.support.hand_client import HandClient
from tests.support.hand_control import HandController
from tests.support.requests import endless, greedy
from tests.support.waits import until_true
from tests.workers.support import StartControlled


class Scene:
    """A worker with one request in flight, during a transfer of weights."""

    def __init__(self, client: HandClient, boss: HandController, worker: Worker, root: Path) -> None:
        self.client = client
        self.boss = boss
        self._worker = worker
        self.root = root
        data = write_checkpoint(root / "next", fill=3) / "model.safetensors"
        self._info = {"data": base64.b64encode(data.read_bytes()).decode()}

    async def start(self, **fields: object) -> None:
        """Begin a transfer, and return when the client has all tokens that were sampled before."""
        await self.boss.applied("start_weight_update", **fields)
        # Client and controller use separate connections, so messages to one prove nothing about the other.
        await self.client.until_state("w", WorkerState.UPDATING)
        # The wait ends when the client has acknowledged all frames.
        await until_true(lambda: not self._worker._links.outbound.held_bytes)

    async def finish(self, version: int = 2) -> None:
        """Transfer the rest, as weights of `version`."""
        await self.boss.applied("update_weight_chunk", info=self._info)
        await self.boss.applied("finish_weight_update", version=version)

    def num_tokens(self) -> int:
        """Return the number of tokens that the client has received."""
        return sum(chunk.num_tokens for chunk in self.client.chunks["r"])

    def versions(self) -> set[int]:
        """Return the weight versions of these tokens."""
        return {chunk.weight_version for chunk in self.client.chunks["r"] if chunk.num_tokens}


@contextlib.asynccontextmanager
async def transferring(start: StartControlled, root: Path) -> AsyncIterator[Scene]:
    """Start the worker, the request and the transfer."""
    own = write_checkpoint(root / "own", fill=1)
    fields: dict[str, Any] = {
        "weight_roots": (str(root),),
        "model_path": str(own),
        "weight_version": 1,
        "prove_reload": False,
    }
    async with start(**fields) as (client, boss, worker, _):
        await client.begin(endless("r"))
        scene = Scene(client, boss, worker, root)
        await scene.start()
        yield scene


async def test_commands_that_need_engine_steps_fail_during_a_transfer(
    controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """Resume, pause(wait), sleep and adapter commands fail with the reason, and no token is sampled.

    The last value of the pause register counts when the transfer has ended.
    """
    async with transferring(controlled_worker, tmp_path) as scene:
        count = scene.num_tokens()
        adapter = str(write_adapter(tmp_path / "adapter"))
        acks = [
            await scene.boss.do("pause", mode="wait"),
            await scene.boss.do("resume"),
            await scene.boss.do("sleep"),
            await scene.boss.do("load_lora", name="a", source={"path": adapter}, version=1),
            await scene.boss.do("unload_lora", name="a"),
            await scene.boss.do("start_weight_update", mode="wait"),
        ]
        assert scene.num_tokens() == count
        await scene.finish()
        await scene.client.until_state("w", WorkerState.SERVING)
        await scene.client.until(lambda: scene.num_tokens() > count + 20)

        *refused, again = acks
        assert {(ack.status, ack.error and ack.error.code) for ack in refused} == {
            (AckStatus.FAILED, ControlCode.NOT_SERVING)
        }
        assert all(ack.seconds < 5 and "a transfer of weights is open" in str(ack.error) for ack in refused)
        assert again.status is AckStatus.APPLIED
        assert scene.versions() == {1, 2}


async def test_pauses_hold_through_a_transfer(controlled_worker: StartControlled, tmp_path: Path) -> None:
    """`keep` and `abort` are applied immediately. After the transfer, the worker stays paused until the resume."""
    async with transferring(controlled_worker, tmp_path) as scene:
        await scene.boss.applied("pause", mode="keep")
        count = scene.num_tokens()
        ended = await scene.boss.applied("pause", mode="abort")
        await scene.client.until_ended("r")
        await scene.boss.applied("pause", mode="wait")
        await scene.finish()
        await scene.client.until_state("w", WorkerState.PAUSED)
        await scene.boss.applied("resume")
        await scene.client.enqueue(greedy(1, 5, request_id="s"))
        await scene.client.until_ended("s")

        assert ended.in_flight == 0
        assert scene.num_tokens() == count
        assert {chunk.weight_version for chunk in scene.client.chunks["s"]} == {2}


async def test_a_drain_during_a_transfer_hands_over_requests_immediately(
    controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """A drain is applied immediately: the streams end as retryable. After the transfer, the worker is drained."""
    async with transferring(controlled_worker, tmp_path) as scene:
        await scene.boss.applied("drain", workers=["w"])
        await scene.client.until_ended("r")
        await scene.finish()
        await scene.client.until_state("w", WorkerState.DRAINED)

        assert scene.client.error_of("r") == ErrorCode.WORKER_FENCED


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_an_update_ends_a_transfer_and_no_request_finishes_on_half_written_weights(
    mode: str, controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """An update ends a transfer, and no request finishes on half-written weights.

    By its mode, requests end as retryable, are aborted, or are kept for the new weights.
    """
    async with transferring(controlled_worker, tmp_path) as scene:
        count = scene.num_tokens()
        path = str(write_checkpoint(tmp_path / "two", fill=2))
        await scene.boss.applied("update_weights", source={"path": path}, version=5, mode=mode, timeout_s=20)
        await scene.client.until_state("w", WorkerState.SERVING)
        if mode == "keep":
            await scene.client.until(lambda: scene.num_tokens() > count)
        else:
            await scene.client.until_ended("r")
            assert scene.num_tokens() == count

        assert scene.versions() == ({1, 5} if mode == "keep" else {1})
        assert scene.client.error_of("r") == (ErrorCode.WORKER_FENCED if mode == "wait" else None)


async def test_a_worker_fenced_during_a_transfer_loads_its_weights_again(
    controlled_worker: StartControlled, tmp_path: Path
) -> None:
    """A worker that was fenced during a transfer may have missed a part: it loads its weights and cannot finish."""
    own = write_checkpoint(tmp_path / "own", fill=1)
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(own), "prove_reload": False}
    async with controlled_worker(**fields) as (client, boss, worker, _):
        await boss.applied("start_weight_update")
        fenced = client.presences["w"].incarnation
        worker._lifecycle.fence("for the test")
        await client.until(lambda: client.presences["w"].incarnation != fenced)
        await client.until_state("w", WorkerState.SERVING)
        finish = await boss.do("finish_weight_update", version=2)

        assert (finish.status, finish.weight_version) == (AckStatus.FAILED, 0)
        assert finish.error.code is ControlCode.TRANSFER_EXPIRED
        assert (await boss.desired()).epoch == 0
