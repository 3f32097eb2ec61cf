"""Commands that come while a transfer of weights is open: no step is made on half-written weights, and all answer."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.control import AckStatus
from schemas.errors import ControlCode, ErrorCode
from schemas.presence import WorkerState
from tests.support.checkpoints import write_adapter, write_checkpoint
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import HandClient, hand_client
from tests.support.hand_controller import HandController, hand_controller
from tests.workers.control_requests import SLOW, endless, request_for, until_state
from workers.worker import Worker

pytestmark = pytest.mark.slow


class Scene:
    """A worker with one request in flight, and weights half way into it."""

    def __init__(self, client: HandClient, boss: HandController, worker: Worker, root: Path) -> None:
        self.client = client
        self.boss = boss
        self._worker = worker
        self.root = root
        data = write_checkpoint(root / "next", fill=3) / "model.safetensors"
        self._info = {"data": base64.b64encode(data.read_bytes()).decode()}

    async def start(self, **fields: object) -> None:
        """Begin a transfer; on return the client has all that was sampled before."""
        await self.boss.applied("start_weight_update", **fields)
        # Client and controller have a connection each: what the one has heard says nothing about the other.
        await until_state(self.client, "w", WorkerState.UPDATING)
        while self._worker._links.routes.held_bytes:  # noqa: ASYNC110 - the client has acknowledged all before it ends
            await asyncio.sleep(0.001)

    async def finish(self, version: int = 2) -> None:
        """Transfer the rest; the weights are those of `version`."""
        await self.boss.applied("update_weight_chunk", info=self._info)
        await self.boss.applied("finish_weight_update", version=version)

    def num_tokens(self) -> int:
        """What the client has of its request."""
        return sum(chunk.num_tokens for chunk in self.client.chunks["r"])

    def versions(self) -> set[int]:
        """Of its tokens."""
        return {chunk.weight_version for chunk in self.client.chunks["r"] if chunk.num_tokens}


@contextlib.asynccontextmanager
async def transferring(nats_url: str, fleet: str, root: Path) -> AsyncIterator[Scene]:
    """Start the worker, the request and the transfer."""
    own = write_checkpoint(root / "own", fill=1)
    fields: dict[str, Any] = {
        "weight_roots": (str(root),),
        "model_path": str(own),
        "weight_version": 1,
        "prove_reload": False,
    }
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW, **fields) as (worker, _),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        scene = Scene(client, boss, worker, root)
        await scene.start()
        yield scene


async def test_what_needs_the_engine_to_go_on_is_refused_at_once(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """Resume, a waiting pause, sleep and adapters: each fails with the reason, and nothing is sampled meanwhile.

    The pause register holds all the same: the last word on it counts when the transfer has ended.
    """
    async with transferring(nats_url, fleet, tmp_path) as scene:
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
        await until_state(scene.client, "w", WorkerState.SERVING)
        await scene.client.until(lambda: scene.num_tokens() > count + 20)

        *refused, again = acks
        assert {(ack.status, ack.error and ack.error.code) for ack in refused} == {
            (AckStatus.FAILED, ControlCode.NOT_SERVING)
        }
        assert all(ack.seconds < 5 and "a transfer of weights has begun" in str(ack.error) for ack in refused)
        assert again.status is AckStatus.APPLIED
        assert scene.versions() == {1, 2}


async def test_pauses_hold_through_a_transfer(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """`keep` and `abort` are applied at once; the worker is paused when the transfer has ended, until the resume."""
    async with transferring(nats_url, fleet, tmp_path) as scene:
        await scene.boss.applied("pause", mode="keep")
        count = scene.num_tokens()
        ended = await scene.boss.applied("pause", mode="abort")
        await scene.client.until_ended("r")
        await scene.boss.applied("pause", mode="wait")
        await scene.finish()
        await until_state(scene.client, "w", WorkerState.PAUSED)
        await scene.boss.applied("resume")
        await scene.client.enqueue(request_for(5, "s"))
        await scene.client.until_ended("s")

        assert ended.in_flight == 0
        assert scene.num_tokens() == count
        assert {chunk.weight_version for chunk in scene.client.chunks["s"]} == {2}


async def test_a_drain_hands_over_what_a_transfer_holds_up(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """It is applied at once: the streams are with others; the worker is drained when the transfer has ended."""
    async with transferring(nats_url, fleet, tmp_path) as scene:
        await scene.boss.applied("drain", workers=["w"])
        await scene.client.until_ended("r")
        await scene.finish()
        await until_state(scene.client, "w", WorkerState.DRAINED)

        assert scene.client.error_of("r") == ErrorCode.WORKER_FENCED


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_an_update_breaks_a_transfer_off(mode: str, nats_url: str, fleet: str, tmp_path: Path) -> None:
    """No request is finished on half-written weights: they go to others, end, or are kept for the new ones."""
    async with transferring(nats_url, fleet, tmp_path) as scene:
        count = scene.num_tokens()
        path = str(write_checkpoint(tmp_path / "two", fill=2))
        await scene.boss.applied("update_weights", source={"path": path}, version=5, mode=mode, timeout_s=20)
        await until_state(scene.client, "w", WorkerState.SERVING)
        if mode == "keep":
            await scene.client.until(lambda: scene.num_tokens() > count)
        else:
            await scene.client.until_ended("r")
            assert scene.num_tokens() == count

        assert scene.versions() == ({1, 5} if mode == "keep" else {1})
        assert scene.client.error_of("r") == (ErrorCode.WORKER_FENCED if mode == "wait" else None)


async def test_a_worker_that_was_fenced_in_a_transfer_does_not_finish_it(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """It may have missed a part: its weights are not to be trusted, and the finish does not make them so."""
    own = write_checkpoint(tmp_path / "own", fill=1)
    fields: dict[str, Any] = {"weight_roots": (str(tmp_path),), "model_path": str(own), "prove_reload": False}
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW, **fields) as (worker, _),
    ):
        await client.until_serving("w")
        await boss.applied("start_weight_update")
        worker._life.fence("for the test")
        await until_state(client, "w", WorkerState.POISONED)
        finish = await boss.do("finish_weight_update", version=2)

        assert (finish.status, finish.weight_version) == (AckStatus.FAILED, 0)
        assert "fenced in the middle of a transfer" in str(client.presences["w"].last_error)
        await boss.applied("update_weights", source={"path": str(own)}, version=3)
        await until_state(client, "w", WorkerState.SERVING)
