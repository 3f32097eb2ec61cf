"""Presence that is older than an ack or than the recorded state."""

import pytest

from rollbus.bus.protocol.fleet.desired import record, shows_ack, stale_workers
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import DesiredState, Drain, Pause
from rollbus.schemas.presence import WorkerState
from tests.support.presences import presence


def test_presence_is_stale_below_the_epoch_of_a_register_of_its_worker() -> None:
    """A worker is stale until its epoch reaches its registers' epochs. A command for another worker does not count."""
    state, _ = record(DesiredState(model="m"), Pause())
    state, _ = record(state, Drain(workers=("b",)))
    workers = [presence(worker="a", epoch=1), presence(worker="b", epoch=1), presence(worker="c", epoch=0)]

    assert stale_workers(workers, {"m": state}) == ("b", "c")
    assert stale_workers(workers, {}) == ()


@pytest.mark.parametrize("state", ["starting", "fenced", "stopped", "failed"])
def test_a_worker_that_will_read_the_state_before_it_serves_is_not_stale(state: str) -> None:
    """A worker that starts or is fenced has no old effect that a reader could take for the recorded one."""
    desired, _ = record(DesiredState(model="m"), Pause())
    assert stale_workers([presence(state=WorkerState(state))], {"m": desired}) == ()


def test_presence_shows_an_ack_from_its_epoch_on() -> None:
    """Presence of the same incarnation shows an ack from its epoch on. A worker that has ended is not awaited."""
    ack = Ack(id="i", command="pause", worker="w", incarnation="1", model="m", status=AckStatus.APPLIED, epoch=3)

    assert [shows_ack(presence(epoch=epoch), ack) for epoch in (2, 3, 4)] == [False, True, True]
    assert shows_ack(None, ack)
    assert shows_ack(presence(incarnation="2", epoch=0), ack)
    one_off = Ack(id="i", command="abort", worker="w", incarnation="1", model="m", status=AckStatus.APPLIED)
    assert shows_ack(presence(epoch=0), one_off)
