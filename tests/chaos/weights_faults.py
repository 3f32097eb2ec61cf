"""The trainer of a run through weight versions, and the faults while it publishes a version."""

import asyncio
import os
import signal
import tempfile
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from nats.aio.msg import Msg

import rollbus
from bench.processes import Way
from rollbus.bus.control.controller import OnAck
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import subscribe
from rollbus.bus.objects.catalog import list_objects, list_subjects
from rollbus.bus.objects.layout import parts_subject
from rollbus.bus.objects.uploads import sources_in
from rollbus.bus.protocol.weights.chain import MAX_DELTAS
from rollbus.bus.publish.versions import VersionChain
from rollbus.bus.subjects import Subjects, published_bucket
from rollbus.schemas.acks import Ack
from rollbus.schemas.messages import decode_ack
from rollbus.schemas.presence import WorkerState
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.faults import Fault, Victims
from tests.chaos.publisher import FLEET, MODEL
from tests.elastic.publishing import Publishing, publisher
from tests.support.fleet import until_worker
from tests.support.nats_server import opened

KINDS = (
    "nothing",
    "worker killed while it stages",
    "worker killed while it loads",
    "worker killed while it verifies",
    "server killed",
    "publisher killed before the manifest",
    "publisher killed before the record",
    "delta damaged",
    "second publisher",
    "older version",
    "late worker",
    "server restarted",
    "publisher slept",
    "newer version",
    "disk full",
)
"""Each kind once in this order, then random kinds, half of them `nothing`."""
SERVER_AWAY_S = 0.3


class Trainer:
    """Publishes from a separate process, updates the fleet, and handles the faults meanwhile.

    Args:
        rb: client that sends commands, separate from the publisher's client.
        start_late: function that starts a worker on a separate machine, with this cache and these options.
    """

    def __init__(
        self,
        rb: rollbus.Client,
        url: str,
        suffering: Victims,
        checkpoints: Checkpoints,
        start_late: Callable[..., AbstractAsyncContextManager[Process]],
    ) -> None:
        self.faults: Counter[str] = Counter()
        self._rb = rb
        self._url = url
        self._suffering = suffering
        self._checkpoints = checkpoints
        self._start_late = start_late
        self._publishing = Publishing(url, checkpoints, suffering.revive)
        self.refusals = self._publishing.refusals
        """Rejected publications and updates, by type of the error."""
        self._lives = AsyncExitStack()
        self._way: Way
        self._tries: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed while it stages": partial(self._kill_worker, _is_staging),
            "worker killed while it loads": partial(self._kill_worker, _is_loading),
            "worker killed while it verifies": partial(self._kill_worker, _is_verifying),
            "delta damaged": self._damage_delta,
            "server killed": self._strike_server,
            "server restarted": self._strike_server,
            "publisher killed before the manifest": partial(self._kill_publisher, "die"),
            "publisher killed before the record": partial(self._kill_publisher, "die-late"),
            "publisher slept": self._sleep,
            "second publisher": self._reject_second_publisher,
            "older version": self._go_back,
            "late worker": self._join_late,
            "newer version": self._overtake,
            "disk full": self._fill_disk,
            "nothing": self._publish,
        }

    async def __aenter__(self) -> Self:
        """Start the publisher."""
        self._way = await self._lives.enter_async_context(self._publisher("trainer"))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the publisher."""
        await self._lives.aclose()

    def _publisher(self, name: str) -> AbstractAsyncContextManager[Way]:
        return publisher(self._url, name, self._checkpoints.folders[0])

    async def publish(self, kind: str, victim: int) -> int:
        """Publish the current tensors during this fault and return the version that all workers get.

        Args:
            victim: number of the affected worker, for faults of workers.
        """
        self._kind, self._victim = kind, victim
        await self._tries[kind]()
        self.faults[kind] += 1
        return self._publishing.version

    async def _publish(self, how: str = "update", *, way: Way | None = None) -> None:
        await self._publishing.publish(way or self._way, how)

    async def _kill_worker(self, is_time: Callable[[Ack], bool]) -> None:
        met, victim = asyncio.Event(), f"w{self._victim}"

        async def check_ack(message: Msg) -> None:
            ack = decode_ack(message.data)
            if ack.worker == victim and is_time(ack):
                met.set()

        async def kill() -> None:
            await met.wait()
            await self._suffering.inject(Fault(0.0, "worker killed", self._victim, 0.0))

        async with opened(self._url) as nats, asyncio.TaskGroup() as tasks:
            await subscribe(nats, Subjects(FLEET).acks_to("trainer"), check_ack)
            tasks.create_task(kill(), name="walk.kill")
            await self._publish()
            # If the worker was faster than the fault, it is killed nevertheless.
            met.set()

    async def _strike_server(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            fault = Fault(0.0, self._kind, 0, SERVER_AWAY_S)
            tasks.create_task(self._suffering.inject(fault), name="walk.server")
            await self._publish()

    async def _kill_publisher(self, how: str) -> None:
        self._publishing.version += 1
        folder = self._checkpoints.write(self._publishing.version)
        with pytest.raises(RuntimeError, match="has exited"):
            await self._way.ask(self._publishing.version, folder, how)
        await self._lives.aclose()
        self._way = await self._lives.enter_async_context(self._publisher("trainer"))
        await self._publish()

    async def _sleep(self) -> None:
        """Let another publisher take over. The stopped publisher commits nothing until the other one has closed."""
        os.kill(self._way.pid, signal.SIGSTOP)
        try:
            async with self._publisher("other") as other:
                await self._publish(way=other)
                os.kill(self._way.pid, signal.SIGCONT)
                await self._refused(self._publishing.version + 1)
        finally:
            os.kill(self._way.pid, signal.SIGCONT)
        await self._publish()

    async def _reject_second_publisher(self) -> None:
        async with self._publisher("other") as other:
            await self._refused(self._publishing.version + 1, way=other)
        await self._publish()

    async def _go_back(self) -> None:
        await self._refused(self._publishing.version)
        await self._publish()

    async def _damage_delta(self) -> None:
        await self._publish("damage")

    async def _refused(self, version: int, *, way: Way | None = None) -> None:
        """Try to publish, and check that the attempt is rejected."""
        answer = await (way or self._way).ask(version, self._checkpoints.folders[self._publishing.version], "update")
        assert "error" in answer, answer
        self.refusals[answer["error"]] += 1

    async def _join_late(self) -> None:
        await self._publish()
        with tempfile.TemporaryDirectory(prefix="rollbus-walk-") as cache:
            await self._join_and_wait(Path(cache))

    async def _join_and_wait(self, cache: Path) -> None:
        """Start a worker on a separate machine, and wait until it has the version."""
        async with self._start_late(cache) as process:
            await until_worker(self._rb, "late", lambda it: it.weight_version == self._publishing.version)
            self._checkpoints.check(cache)
            process.terminate()
            assert await process.wait() == 0

    async def _fill_disk(self) -> None:
        """Start a worker without room for the weights, check that it does not serve, and give it room."""
        await self._publish()
        with tempfile.TemporaryDirectory(prefix="rollbus-walk-") as cache:
            async with self._start_late(Path(cache), "--stage-bytes", "1") as process:
                full = await until_worker(self._rb, "late", lambda it: "--stage-bytes" in (it.last_error or ""))
                assert full.state is not WorkerState.SERVING
                assert full.weight_version != self._publishing.version
                process.terminate()
                assert await process.wait() == 0
            await self._join_and_wait(Path(cache))

    async def _overtake(self) -> None:
        """Switch the fleet to a version while it stages an older one."""
        stored = []
        for _ in range(2):
            self._checkpoints.change("few")
            version = self._publishing.version = self._publishing.version + 1
            answer = await self._way.ask(version, self._checkpoints.write(version), "store")
            stored.append(answer["objects"])
        loop, is_staging = asyncio.get_running_loop(), asyncio.Event()

        def on_ack(_ack: Ack) -> None:
            loop.call_soon_threadsafe(is_staging.set)

        async with asyncio.TaskGroup() as tasks:
            older = tasks.create_task(
                self._update(stored[0], self._publishing.version - 1, on_ack),
                name="walk.older",
            )
            older.add_done_callback(lambda _: is_staging.set())
            await is_staging.wait()
            await self._update(stored[1], self._publishing.version)
        assert await self._publishing.is_recorded()

    async def _update(self, objects: str, version: int, on_ack: OnAck | None = None) -> None:
        """Switch the fleet to a stored version. Count the error if a newer version prevents it."""
        try:
            await self._rb.fleet.update_weights(objects=objects, version=version, model=MODEL, on_ack=on_ack)
        except (rollbus.CommandIncomplete, rollbus.ControlError) as error:
            self.refusals[type(error).__name__] += 1

    async def check_store(self) -> None:
        """Check that after a cleanup the store contains only the chain record and the chunks of its versions."""
        await self._lives.aclose()
        async with opened(self._url) as nats:
            state = await DesiredStore(nats, Subjects(FLEET)).read(MODEL)
            assert state is not None
            store = VersionChain(self._url, Subjects(FLEET), MODEL, publisher="trainer")
            await store.open()
            try:
                await store.clean(set(sources_in(state)), young_s=0.0)
            finally:
                await store.close()
            bucket = published_bucket(FLEET, MODEL)
            infos = await list_objects(nats, bucket)
            described = {info.nuid for info in infos if info.size}
            subjects = await list_subjects(nats, bucket, parts_subject(bucket, ">"))
            folders = {info.name.rpartition("/")[0] for info in infos}
        assert {subject.rpartition(".")[2] for subject in subjects} == described
        links = {link.objects.partition("/")[2] for link in store.record.links}
        assert folders - {"versions"} == links
        assert len(links) <= 2 * (MAX_DELTAS + 1)


def _is_staging(ack: Ack) -> bool:
    return ack.command == "check_weights"


def _is_loading(ack: Ack) -> bool:
    return ack.stage == "loading"


def _is_verifying(ack: Ack) -> bool:
    return ack.stage == "verifying"
