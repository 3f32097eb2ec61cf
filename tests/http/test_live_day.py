"""The last day in the events that viewers receive."""

import time
from typing import cast

from rollbus.bus.client.fleet_state import FleetWatch, HeardWorker
from rollbus.bus.control.revisions import HISTORY, StoredState
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.protocol.fleet import desired
from rollbus.bus.subjects import Subjects
from rollbus.frontend.http.live.events import FleetDay
from rollbus.schemas.control import AnyCommand, DesiredState, FlushCache, Pause, Resume
from tests.http.live_support import watching
from tests.http.support import Serve
from tests.support.fleet import presence, synthetic_worker
from tests.support.nats_server import opened

MODEL = "synthetic"
RECORDED = HISTORY + 6


async def test_the_recorded_commands_are_known_to_a_service_that_starts_later(
    serve_fleet: Serve, nats_url: str, fleet: str
) -> None:
    """A service that starts later has the commands that the store keeps, and says from when on.

    It adds each later command, also one that is recorded while nobody watches.
    """
    async with opened(nats_url) as nats, serve_fleet() as http:
        store = DesiredStore(nats, Subjects(fleet))
        for _ in range(RECORDED):
            await store.record(MODEL, FlushCache(), "operator")
        async with watching(http) as stream:
            day = await stream.until("day", lambda day: day["commands"])
            assert [each["epoch"] for each in day["commands"]] == [*range(7, RECORDED + 1)]
            assert {(each["what"], each["by"], each["model"]) for each in day["commands"]} == {
                ("flush_cache", "operator", MODEL)
            }
            assert (day["commands_since"], day["problem"]) == (day["commands"][0]["at"], None)
            await store.record(MODEL, Pause(id="p", mode="wait"))
            day = await stream.until("day", lambda day: day["commands"][-1]["what"] == "pause")
            assert (day["commands"][-1]["id"], day["commands"][-1]["detail"]) == ("p", "wait")
        await store.record(MODEL, Resume())
        async with synthetic_worker(nats_url, fleet), watching(http) as stream:
            day = await stream.until("day", lambda day: day["workers"])
    assert len(day["commands"]) == HISTORY + 2
    assert [each["what"] for each in day["workers"]] == ["started"]


class Store:
    """The stored states of one model."""

    def __init__(self) -> None:
        self.states = [DesiredState(model=MODEL, bucket="one")]

    def add(self, command: AnyCommand) -> dict[str, DesiredState]:
        """Record a command."""
        self.states.append(desired.record(self.states[-1], command)[0])
        return {MODEL: self.states[-1]}

    async def history(self, _: str, after: int) -> tuple[StoredState, ...]:
        """Return the states after a sequence number."""
        return tuple(StoredState(i + 1, time.time(), state) for i, state in enumerate(self.states) if i >= after)


async def test_a_worker_that_announces_a_wrong_epoch_hides_no_command() -> None:
    """A worker may announce any epoch. Each recorded command is in the log once."""
    day, store = FleetDay(), Store()
    watch, liar = cast(FleetWatch, store), HeardWorker(presence(model=MODEL, epoch=2**53), 0.0)
    states = store.add(Pause(id="a"))
    await day.read_announced(watch, [liar])
    await day.read(watch, states)
    states = store.add(Resume(id="b"))
    await day.read_announced(watch, [liar])
    await day.read(watch, states)
    await day.read(watch, states)
    assert [each.id for each in day.snapshot().commands] == ["a", "b"]


async def test_a_store_that_was_made_again_is_read_from_its_start() -> None:
    """After the loss of the store, the commands of the new store follow those of the old one."""
    day, store = FleetDay(), Store()
    watch = cast(FleetWatch, store)
    for number in range(3):
        states = store.add(Pause(id=f"old-{number}"))
    await day.read(watch, states)
    store.states = [DesiredState(model=MODEL, bucket="two")]
    await day.read(watch, store.add(Pause(id="new")))
    assert [each.id for each in day.snapshot().commands] == ["old-0", "old-1", "old-2", "new"]
