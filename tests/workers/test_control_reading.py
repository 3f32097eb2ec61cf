"""The number of a worker's reads of the desired state."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.fleet import desired
from rollbus.schemas.control import DesiredState, FlushCache, Pause
from rollbus.schemas.errors import BusBroken
from rollbus.workers.control import desired as module
from rollbus.workers.control.desired import DesiredReader
from tests.support.waits import SOON_S, until_true

MODEL = "m"


class Store:
    """A store that answers each read on demand, with the state at the begin of the read."""

    def __init__(self) -> None:
        self.state = DesiredState(model=MODEL)
        self.num_begun = self.num_unwatched = 0
        self.unheard_s = 0.0
        self._answers: asyncio.Queue[BusBroken | None] = asyncio.Queue()

    async def read(self, _model: str) -> DesiredState:
        """Return the state, as the real store does."""
        state = self.state
        self.num_begun += 1
        error = await self._answers.get()
        if error is not None:
            raise error
        return state

    async def watch(self, _model: str, _on_write: Callable[[], object]) -> None:
        """Do not count the reads before the subscription. Another read follows."""
        self.num_unwatched, self.num_begun = self.num_begun, 0
        self.answer()

    async def confirmed_s(self) -> float:
        """Return 0, as a store on one server does, or what a test has set."""
        return self.unheard_s

    def record(self, command: Pause | FlushCache) -> int:
        """Record a command, and return its epoch."""
        self.state, epoch = desired.record(self.state, command)
        return epoch

    def answer(self, error: BusBroken | None = None) -> None:
        """Answer a read."""
        self._answers.put_nowait(error)

    async def until_begun(self, count: int) -> None:
        """Wait until `count` reads have begun."""
        await until_true(lambda: self.num_begun >= count)


class Reading:
    """A reader with this store."""

    def __init__(self) -> None:
        self.store = Store()
        self.reader = DesiredReader(cast(DesiredStore, self.store), model=MODEL, worker="w", max_age_s=60.0)

    async def until_read(self, look: int) -> None:
        """Wait until the reader has finished read number `look`."""
        await until_true(lambda: self.reader.num_read >= look)

    async def rest(self) -> None:
        """Let the reader begin all reads that it will begin."""
        for _ in range(5):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def reading() -> AsyncIterator[Reading]:
    """Run the reader, and yield it after its first reads."""
    made = Reading()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(SOON_S):
        task = tasks.create_task(made.reader.run(), name="read")
        made.store.answer()
        await made.rest()
        yield made
        task.cancel()


async def test_a_command_in_an_earlier_read_needs_no_new_read() -> None:
    """A command that an earlier read contains needs no new read when its message arrives.

    The worker receives messages after its first read, not the first states that other starting workers write.
    """
    async with reading() as made:
        assert made.store.num_unwatched == 1
        epoch = made.store.record(Pause(id="p"))
        made.store.answer()
        await made.until_read(made.reader.request_read())
        look = made.reader.request_command("pause", epoch, "p")
        await made.rest()

        assert (look, made.store.num_begun) == (made.reader.num_read, 2)


async def test_the_current_read_serves_commands_that_arrive_during_the_read() -> None:
    """The current read serves commands that arrive during it, if it contains them. No other read follows."""
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


async def test_a_command_recorded_after_a_read_began_causes_another_read() -> None:
    """A read that began before a command was recorded does not count for it, so another read follows."""
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


async def test_a_command_with_the_same_epoch_and_another_id_does_not_count() -> None:
    """A command with the same epoch but another id does not count, as after a lost bucket."""
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


async def test_a_read_request_during_a_read_causes_another_read() -> None:
    """A read request without a command during a read causes another read."""
    async with reading() as made:
        made.reader.request_read()
        await made.store.until_begun(2)
        look = made.reader.request_read()
        made.store.answer()
        await made.store.until_begun(3)

        assert made.reader.num_read < look


async def test_the_read_after_a_failed_read_serves_the_waiting_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read serves the commands that arrived during a failed read."""
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


async def test_reads_from_before_a_fence_do_not_count() -> None:
    """After a fence, reads that began before it do not count, not even for a command that they contained."""
    async with reading() as made:
        epoch = made.store.record(Pause(id="p"))
        made.store.answer()
        await made.until_read(made.reader.request_read())
        made.reader.request_read()
        await made.store.until_begun(3)
        made.reader.invalidate()
        look = made.reader.request_command("pause", epoch, "p")
        assert made.reader.num_read < look
        made.store.answer()
        await made.store.until_begun(4)
        assert not made.reader.is_fresh
        made.store.answer()
        await made.until_read(look)

        assert made.reader.is_fresh


async def test_a_read_makes_no_state_older() -> None:
    """If the leader has heard nothing since an earlier read, or answers late, that read counts as before."""
    async with reading() as made:
        made.store.answer()
        await made.until_read(made.reader.request_read())
        made.store.unheard_s = 30.0
        made.store.answer()
        await made.until_read(made.reader.request_read())

        assert made.reader.is_fresh
