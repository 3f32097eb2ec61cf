"""The lifecycle of a worker whose process was stopped for longer than its lease."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import rollbus.workers.lifecycle
from rollbus.bus.logs import LOG_VARIABLE
from rollbus.bus.nats.connection import Connection
from rollbus.bus.protocol.states import WorkerEvent
from rollbus.schemas.messages import decode_presence
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.workers.config import WorkerConfig
from rollbus.workers.lifecycle import WorkerLifecycle, log_name
from tests.support.fleet import presence

LEASE_S = 6.0


class Wire:
    """A connection that stores the published presences, and whose server confirms everything."""

    is_connected = True

    def __init__(self) -> None:
        self.announced: list[WorkerPresence] = []

    async def publish(self, _subject: str, data: bytes, *_: object) -> None:
        """Store a presence."""
        self.announced.append(decode_presence(data))

    async def confirm(self, *, timeout_s: float) -> bool:
        """Return True, as the server has the data."""
        return timeout_s > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock that the worker reads: its time is `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(rollbus.workers.lifecycle, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def make_life(wire: Wire) -> WorkerLifecycle:
    """Return the lifecycle of a worker that serves and does not listen for others."""
    config = WorkerConfig(nats_url="", model="m", worker_id="same", lease_s=LEASE_S, listen_s=0.0)

    def describe() -> WorkerPresence:
        return presence(worker="same", incarnation=life.incarnation, state=life.state, held_s=life.held_s)

    life = WorkerLifecycle(
        config,
        cast(Connection, wire),
        describe=describe,
        on_fenced=lambda: None,
        on_changed=lambda: None,
        on_duplicate=lambda _error: None,
    )
    life.transition(WorkerEvent.READY)
    life.transition(WorkerEvent.CAUGHT_UP)
    return life


async def test_after_a_long_stop_a_worker_first_publishes_that_the_worker_is_fenced(clock: SimpleNamespace) -> None:
    """After a long stop, a worker first publishes that it is fenced.

    A heartbeat of the old incarnation would renew the lease that peers have seen expire.
    """
    wire = Wire()
    life = make_life(wire)
    await life.publish_presence()
    clock.now += LEASE_S + 1
    await life.publish_presence()

    assert [announced.state for announced in wire.announced] == [WorkerState.SERVING, WorkerState.FENCED]
    assert wire.announced[0].incarnation != wire.announced[1].incarnation == life.incarnation
    assert life.times_fenced == 1


async def test_a_stopped_worker_yields_to_its_successor(clock: SimpleNamespace) -> None:
    """If a worker receives a presence of its successor before its own next heartbeat, it does not serve.

    After several presences of the successor, it ends.
    """
    wire = Wire()
    life = make_life(wire)
    await life.publish_presence()
    clock.now += LEASE_S + 1
    other = presence(worker="same", incarnation="other", held_s=0.1)

    assert not life.on_presence(other)
    await life.publish_presence()
    assert life.state is WorkerState.FENCED
    assert [announced.state for announced in wire.announced] == [WorkerState.SERVING]
    heard = []
    for _ in range(4):
        clock.now += 1
        heard.append(life.on_presence(other))
    assert heard == [False, False, True, True]


def test_presence_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker names the file that its supervisor names, else the journal. A name without a file is not announced."""
    log = tmp_path / "w0.log"
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    assert log_name() == "journal"
    log.touch()
    assert log_name() == str(log)
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "none"))
    monkeypatch.delenv("JOURNAL_STREAM")
    assert log_name() is None
