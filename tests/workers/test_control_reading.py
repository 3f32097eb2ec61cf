"""How often a worker reads what is desired of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.fleet import desired
from rollbus.schemas.control import FlushCache, Pause
from rollbus.schemas.desired import DesiredState
from rollbus.schemas.errors import BusBroken
from rollbus.workers.control import reading as module
from rollbus.workers.control.reading import DesiredReader
from tests.support.patience import SOON_S

MODEL = "m"


class Store:
    """Answers each read when it is told to, with what stood there when the read began."""

    def __init__(self) -> None:
        self.state = DesiredState(model=MODEL)
        self.num_begun = 0
        self._begun = asyncio.Event()
        self._answers: asyncio.Queue[BusBroken | None] = asyncio.Queue()

    async def read(self, _model: str) -> DesiredState:
        """As the store's."""
        state = self.state
        self.num_begun += 1
        self._begun.set()
        error = await self._answers.get()
        if error is not None:
            raise error
        return state

    async def confirmed_s(self) -> float:
        """As the store's on one server."""
        return 0.0

    def record(self, command: Pause | FlushCache) -> int:
        """Record a command; returns its epoch."""
        self.state, epoch = desired.record(self.state, command)
        return epoch

    def answer(self, error: BusBroken | None = None) -> None:
        """Answer a read."""
        self._answers.put_nowait(error)

    async def until_begun(self, count: int) -> None:
        """Wait until so many reads have begun."""
        while self.num_begun < count:
            self._begun.clear()
            await self._begun.wait()


class Reading:
    """A reader on such a store."""

    def __init__(self) -> None:
        self.store = Store()
        self._changed = asyncio.Event()
        self.reader = DesiredReader(cast(DesiredStore, self.store), model=MODEL, worker="w", max_age_s=60.0)
        self.reader.on_read = self._changed.set

    async def until_read(self, look: int) -> None:
        """Wait until a look was followed."""
        while self.reader.num_read < look:
            self._changed.clear()
            await self._changed.wait()

    async def rest(self) -> None:
        """Let the reader begin whatever it will begin."""
        for _ in range(5):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def reading() -> AsyncIterator[Reading]:
    """Run the reader; it has read once."""
    made = Reading()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(SOON_S):
        task = tasks.create_task(made.reader.run(), name="read")
        made.store.answer()
        await made.store.until_begun(1)
        await made.rest()
        yield made
        task.cancel()


async def test_a_command_that_was_read_needs_no_other_look() -> None:
    """What its recording had read already is not read again when the command itself is heard."""
    async with reading() as made:
        epoch = made.store.record(Pause(id="p"))
        made.store.answer()
        await made.until_read(made.reader.request_read())
        look = made.reader.request_command("pause", epoch, "p")
        await made.rest()

        assert (look, made.store.num_begun) == (made.reader.num_read, 2)


async def test_a_command_is_found_in_the_read_under_way() -> None:
    """Commands that are heard while they are being read are done with that read, and there is no other."""
    async with reading() as made:
        pause, flush = made.store.record(Pause(id="p")), made.store.record(FlushCache(id="f"))
        made.reader.request_read()
        await made.store.until_begun(2)
        looks = [made.reader.request_command("pause", pause, "p"), made.reader.request_command("flush", flush, "f")]
        made.store.answer()
        await made.until_read(max(looks))
        await made.rest()

        assert set(made.reader.effective) == {"pause", "flush"}
        assert made.store.num_begun == 2


async def test_a_command_that_a_read_came_too_early_for_is_read() -> None:
    """The read under way had begun before it was recorded: only the next one counts."""
    async with reading() as made:
        made.reader.request_read()
        await made.store.until_begun(2)
        look = made.reader.request_command("pause", made.store.record(Pause(id="p")), "p")
        made.store.answer()
        await made.store.until_begun(3)
        assert made.reader.num_read < look
        made.store.answer()
        await made.until_read(look)

        assert set(made.reader.effective) == {"pause"}


async def test_another_command_of_the_same_epoch_is_not_taken_for_it() -> None:
    """As after a bucket was lost: what was read bears another id, and counts for nothing."""
    async with reading() as made:
        epoch = made.store.record(Pause(id="before"))
        made.store.answer()
        await made.until_read(made.reader.request_read())
        made.store.state = DesiredState(model=MODEL)
        assert made.store.record(Pause(id="after")) == epoch
        look = made.reader.request_command("pause", epoch, "after")
        assert made.reader.num_read < look
        made.store.answer()
        await made.until_read(look)

        assert made.reader.effective["pause"].command.id == "after"


async def test_a_look_during_a_read_is_followed_by_another() -> None:
    """Whoever looks without saying for what gets what stands there afterwards."""
    async with reading() as made:
        made.reader.request_read()
        await made.store.until_begun(2)
        look = made.reader.request_read()
        made.store.answer()
        await made.store.until_begun(3)

        assert made.reader.num_read < look


async def test_a_failed_read_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was heard during a read that failed is done with the next one."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    async with reading() as made:
        epoch = made.store.record(Pause(id="p"))
        made.reader.request_read()
        await made.store.until_begun(2)
        look = made.reader.request_command("pause", epoch, "p")
        made.store.answer(BusBroken("not now"))
        await made.store.until_begun(3)
        assert (made.reader.num_read < look, made.reader.problem) == (True, "not now")
        made.store.answer()
        await made.until_read(look)

        assert made.reader.problem is None


async def test_who_was_away_reads_again() -> None:
    """Nothing that was read before counts after a fence, not even for a command that was in it."""
    async with reading() as made:
        epoch = made.store.record(Pause(id="p"))
        made.store.answer()
        await made.until_read(made.reader.request_read())
        made.reader.invalidate()
        look = made.reader.request_command("pause", epoch, "p")
        assert made.reader.num_read < look
        made.store.answer()
        await made.until_read(look)

        assert made.reader.is_fresh
