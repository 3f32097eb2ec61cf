"""Which reads of a desired state are current, stale, or show that the state was lost."""

import pytest

from rollbus.bus.protocol.fleet.desired import STALE_S, ReadOrder, ReadVerdict, record
from rollbus.schemas.control import DesiredState, FlushCache

CURRENT, STALE, LOST = ReadVerdict.CURRENT, ReadVerdict.STALE, ReadVerdict.LOST


def state(epoch: int, bucket: str = "a", command: str = "c") -> DesiredState:
    """Return a state with this many commands, whose ids begin with `command`."""
    made = DesiredState(model="m", bucket=bucket)
    for number in range(epoch):
        made, _ = record(made, FlushCache(id=f"{command}{number}"))
    return made


@pytest.mark.parametrize(
    ("reads", "verdicts"),
    [
        ([None, None, state(1)], [CURRENT, CURRENT, CURRENT]),
        ([state(1), state(1), state(3)], [CURRENT, CURRENT, CURRENT]),
        # A read from a deposed leader, then from the current leader. The first command was recorded after the
        # deposition.
        ([state(2), state(1), state(2), state(3)], [CURRENT, STALE, CURRENT, CURRENT]),
        ([state(1), None, state(1)], [CURRENT, STALE, CURRENT]),
        # Another bucket, also with more commands.
        ([state(2), state(1, "b")], [CURRENT, LOST]),
        ([state(2), state(5, "b"), state(6, "b")], [CURRENT, LOST, CURRENT]),
        ([state(2), None, state(3, "b")], [CURRENT, STALE, LOST]),
        # Programs without bucket ids write between programs with bucket ids.
        ([state(1, ""), state(2), state(3, ""), state(4, "b")], [CURRENT] * 4),
        ([state(2), state(1, "")], [CURRENT, STALE]),
        # The same bucket was restored from a backup and has other commands since then.
        ([state(3), state(3, command="d")], [CURRENT, LOST]),
        ([state(3), state(2, command="d")], [CURRENT, LOST]),
    ],
)
def test_each_state_is_stale_lost_or_current_compared_with_the_previous_read(
    reads: list[DesiredState | None], verdicts: list[ReadVerdict]
) -> None:
    """An older state is stale, a state of another bucket or history is lost, and all other states are current."""
    order = ReadOrder()

    assert [order.judge(read, 0.0) for read in reads] == verdicts


@pytest.mark.parametrize("older", [state(1), None])
def test_a_state_that_stays_older_for_too_long_is_the_stored_state(older: DesiredState | None) -> None:
    """A state that stays older for too long is the stored state, because no leader is deposed for so long.

    A current read in between restarts the time.
    """
    order = ReadOrder()
    order.judge(state(2), 0.0)

    assert order.judge(older, 1.0) is STALE
    assert order.judge(state(2), STALE_S - 1) is CURRENT
    assert order.judge(older, STALE_S) is STALE
    assert order.judge(older, 2 * STALE_S - 1) is STALE
    assert order.judge(older, 2 * STALE_S) is LOST
    assert order.judge(older, 2 * STALE_S + 1) is CURRENT
