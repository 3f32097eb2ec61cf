"""Each command is recorded once, even if its write gets no answer, for example after the loss of a leader."""

import contextlib
from collections.abc import Awaitable, Callable

import pytest

from rollbus.bus.control import store as module
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats import jetstream
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import ApiError, Unanswered, put
from rollbus.bus.protocol.fleet import desired
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import DesiredState, FlushCache, Pause, Resume
from rollbus.schemas.errors import BusBroken
from tests.support.nats_server import opened

Write = Callable[[], Awaitable[int]]
MODEL = "m"


class Leader:
    """A replacement for `put` that handles the next writes as `fates` state, and then forwards writes to the server."""

    def __init__(self, *fates: str) -> None:
        self.fates = list(fates)
        self._later: Write | None = None

    async def put(
        self,
        nats: Connection,
        subject: str,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Write as `rollbus.bus.nats.jetstream.put` does, unless the next fate differs."""

        async def write() -> int:
            return await put(nats, subject, data, headers, timeout_s=timeout_s)

        fate = self.fates.pop(0) if self.fates else ""
        later, self._later = self._later, None
        if later is not None:
            # The next leader first decides about the write that the previous leader had forwarded.
            with contextlib.suppress(ApiError):
                await later()
        if fate == "answer lost":
            await write()
        elif fate == "stored later":
            self._later = write
        elif fate == "another was first":
            # The leader answers with this error while another write is in progress in the cluster.
            raise ApiError(10164, "wrong last sequence")
        elif not fate:
            return await write()
        raise Unanswered(f"{fate}: for the test")


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Leader:
    """Return a leader in front of all stores, and let stores retry immediately."""
    made = Leader()
    monkeypatch.setattr(module, "put", made.put)
    monkeypatch.setattr(jetstream, "AGAIN_S", 0.0)
    return made


@pytest.mark.proves("P73")
@pytest.mark.parametrize(
    "fates",
    [
        ["answer lost"],
        ["write lost"],
        ["stored later"],
        ["write lost", "stored later", "answer lost"],
        ["stored later", "stored later"],
        ["another was first"],
        ["stored later", "another was first"],
    ],
    ids="+".join,
)
async def test_a_command_without_an_answer_is_recorded_once(
    nats_url: str, fleet: str, leader: Leader, fates: list[str]
) -> None:
    """Whether or not the write was stored, the command is recorded once and decided on the state before it."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        await store.record(MODEL, Resume(id="before"))
        leader.fates = list(fates)
        befores: list[int] = []

        def change(state: DesiredState) -> DesiredState:
            befores.append(state.epoch)
            return desired.record(state, Pause(id="p"))[0]

        written = await store.change(MODEL, change)
        state, epoch = await store.record(MODEL, FlushCache(id="after"))

        assert set(befores) == {1}
        assert written.epoch == 2
        assert [(seen.id, seen.epoch) for seen in state.seen] == [("before", 1), ("p", 2), ("after", 3)]
        assert epoch == 3


async def test_a_command_is_recorded_after_another_command_if_its_write_was_lost(
    nats_url: str, fleet: str, leader: Leader
) -> None:
    """If the write is lost and another command is recorded first, the command is recorded after the other command."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        leader.fates = ["write lost"]
        is_first = True

        async def other(*args: object, **options: object) -> int:
            nonlocal is_first
            try:
                return await leader.put(*args, **options)  # type: ignore[arg-type]
            except Unanswered:
                if is_first:
                    is_first = False
                    await store.record(MODEL, Resume(id="other"))
                raise

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(module, "put", other)
            state, epoch = await store.record(MODEL, Pause(id="p"))

        assert [(seen.id, seen.epoch) for seen in state.seen] == [("other", 1), ("p", 2)]
        assert epoch == 2


@pytest.mark.parametrize("fate", ["answer lost", "write lost", "stored later"])
async def test_a_reset_without_an_answer_is_done_once(nats_url: str, fleet: str, leader: Leader, fate: str) -> None:
    """A reset without an answer clears the state once, in one epoch, and returns True."""
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        await store.record(MODEL, Pause())
        leader.fates = [fate]

        assert await store.reset(MODEL)
        state = await store.read(MODEL)
        assert (state.epoch, state.registers) == (2, {})


@pytest.mark.parametrize(
    ("fate", "problem"), [("write lost", "for the test"), ("another was first", "another write is on its way")]
)
async def test_the_wait_for_an_answer_to_a_write_is_bounded(
    nats_url: str, fleet: str, leader: Leader, monkeypatch: pytest.MonkeyPatch, fate: str, problem: str
) -> None:
    """If the server answers no write within the time of an election, the store raises an error with the reason."""
    monkeypatch.setattr(jetstream, "ELECTION_S", 0.05)
    async with opened(nats_url) as nats:
        store = DesiredStore(nats, Subjects(fleet))
        leader.fates = [fate] * 100_000
        with pytest.raises(BusBroken, match=problem):
            await store.record(MODEL, Pause())
