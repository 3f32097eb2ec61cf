"""The versions of the weights of a run, each published by a separate process until it is recorded."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from bench.processes import Way
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import connected
from rollbus.bus.nats.server import Server
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import UpdateWeights
from rollbus.schemas.errors import BusBroken
from tests.chaos.checkpoints import Checkpoints
from tests.chaos.publisher import FLEET, MODEL
from tests.support.processes import forked

AGAIN_S = 0.1
"""Seconds before a failed publication is repeated."""


async def _nothing() -> None:
    return


@contextlib.asynccontextmanager
async def publisher(url: str, name: str, *paths: Path) -> AsyncIterator[Way]:
    """Run `tests.chaos.publisher` while the block runs.

    Args:
        paths: the checkpoint with which training began, and perhaps credentials.
    """
    arguments = (url, name, *map(str, paths))
    async with forked("tests.chaos.publisher", arguments, streams=(PIPE, PIPE, 2)) as process:
        way = Way(name, process)
        try:
            while await way.line() != "ready\n":
                pass
            yield way
        finally:
            process.stdin.close()
            await process.wait()


class Publishing:
    """Publishes checkpoints.

    Args:
        server: the server, with a user who may read desired states.
        on_refusal: called after each failed publication.
    """

    def __init__(
        self, server: Server | str, checkpoints: Checkpoints, on_refusal: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        self.version = 0
        self.refusals: Counter[str] = Counter()
        """Failed publications, by type of the error."""
        self._server = server
        self._checkpoints = checkpoints
        self._on_refusal = on_refusal

    async def publish(self, way: Way, how: str = "update") -> None:
        """Publish the current tensors as the next version, and as further versions until one is recorded.

        Args:
            how: as in `tests.chaos.publisher`, for the first version.
        """
        while True:
            self.version += 1
            answer = await way.ask(self.version, self._checkpoints.write(self.version), how)
            if "error" not in answer:
                return
            self.refusals[answer["error"]] += 1
            await self._on_refusal()
            if await self.is_recorded():
                return
            how = "update"
            await asyncio.sleep(AGAIN_S)

    async def is_recorded(self) -> bool:
        """Return True if the version is recorded, whether or not all workers have it yet."""
        try:
            async with connected(self._server, name="test") as nats:
                state = await DesiredStore(nats, Subjects(FLEET)).read(MODEL)
        except BusBroken:
            return False
        command = None if state is None or "weights" not in state.registers else state.registers["weights"].command
        return isinstance(command, UpdateWeights) and command.version == self.version
