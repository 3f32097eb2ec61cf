"""A publisher in a separate process that faults may kill or stop.

    python -m tests.chaos.publisher URL NAME FOLDER [CREDENTIALS]

It reads lines `VERSION FOLDER HOW` on stdin, as `bench.processes` does, publishes the checkpoint of that folder, and
answers with the outcome. `HOW` is one of these:

- `update`: workers switch to the version.
- `store`: the version is only stored.
- `damage`: the delta is overwritten before workers fetch it.
- `die`: the process kills itself before it stores the manifest.
- `die-late`: the process kills itself before it writes the chain record.

A publisher without a lease tries to get one at the next line.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import uvloop

import rollbus
from bench.processes import answer
from rollbus.bus.nats.connection import publish
from rollbus.bus.nats.jetstream import ask
from rollbus.bus.objects.catalog import list_prefix
from rollbus.bus.objects.layout import parts_subject
from rollbus.bus.protocol.weights import chain
from rollbus.bus.publish import versions
from rollbus.bus.publish.chain_store import ChainKey
from rollbus.bus.publish.publication import Publication
from rollbus.bus.publish.tensors import folder_tensors
from rollbus.bus.publish.version_publisher import VersionPublisher
from rollbus.schemas.errors import ControlCode
from tests.support.nats_server import opened

FLEET = "walk"
MODEL = "model"
LEASE_S, MARGIN_S, RENEW_S = 2.0, 0.5, 0.5
"""Short, because faults wait until the lease expires."""


class Program:
    """Publishes checkpoints on request.

    Args:
        checkpoint: folder with which training began.
    """

    def __init__(self, url: str, rb: rollbus.Client, checkpoint: str) -> None:
        self._url = url
        self._rb = rb
        self._checkpoint = checkpoint
        self._life = AsyncExitStack()
        self._weights: rollbus.WeightPublisher | None = None

    async def close(self) -> None:
        """Release the lease."""
        self._weights = None
        await self._life.aclose()

    async def publish(self, question: list[str]) -> dict[str, Any]:
        """Publish a checkpoint and return the outcome."""
        version, folder, how = question
        if how == "die":
            Publication.commit = _die  # type: ignore[method-assign]
        elif how == "die-late":
            ChainKey.write = _die  # type: ignore[method-assign]
        try:
            if self._weights is None:
                publisher = rollbus.WeightPublisher(self._rb, model=MODEL, checkpoint=self._checkpoint)
                self._weights = await self._life.enter_async_context(publisher)
            with self._damaging() if how == "damage" else contextlib.nullcontext():
                published = await self._weights.publish(
                    folder_tensors(folder), version=int(version), update=how != "store"
                )
        except rollbus.RollbusError as error:
            if isinstance(error, rollbus.ControlError) and error.code is ControlCode.PUBLISHER_BUSY:
                await self.close()
            return {"error": type(error).__name__, "message": str(error)}
        found: dict[str, Any] = msgspec.to_builtins(published)
        return found

    @contextlib.contextmanager
    def _damaging(self) -> Iterator[None]:
        load = VersionPublisher.load

        async def damage_and_load(publisher: VersionPublisher, objects: str, options: Any) -> Any:
            await self._damage(objects)
            return await load(publisher, objects, options)

        VersionPublisher.load = damage_and_load  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            VersionPublisher.load = load  # type: ignore[method-assign]

    async def _damage(self, objects: str) -> None:
        """Overwrite a version's delta with random bytes."""
        async with opened(self._url) as nats:
            bucket = objects.partition("/")[0]
            for info in await list_prefix(nats, objects, is_signed=False):
                if "/delta-" in info.name:
                    subject = parts_subject(bucket, info.nuid)
                    await ask(nats, f"STREAM.PURGE.OBJ_{bucket}", {"filter": subject})
                    await publish(nats, subject, os.urandom(info.size))


async def _die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def serve(url: str, name: str, checkpoint: str, credentials: str | None = None) -> None:
    """Publish until stdin ends."""
    chain.LEASE_S, chain.MARGIN_S, versions.RENEW_S = LEASE_S, MARGIN_S, RENEW_S  # type: ignore[misc]
    async with rollbus.connect(url, fleet=FLEET, client=name, credentials=credentials) as rb:
        program = Program(url, rb, checkpoint)
        try:
            await answer(program.publish)
        finally:
            await program.close()


def main() -> int:
    """Run the publisher with the arguments of `serve`."""
    uvloop.run(serve(*sys.argv[1:]))
    return 0
