"""The rule for the restart of an ended process."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.frontend.cli.local.processes import RestartRule, Restarts
from rollbus.schemas.errors import EXIT_DUPLICATE_WORKER

RULE = RestartRule()


def test_the_delay_doubles_with_each_of_five_restarts() -> None:
    """The delays before five restarts are 1, 2, 4, 8 and 16 s.

    After the sixth end within ten minutes, no restart follows.
    """
    restarts = Restarts(RULE)
    assert [restarts.delay_s(1, lived_s=1, now=now) for now in range(6)] == [1, 2, 4, 8, 16, None]
    assert str(restarts) == "5 of 5 restarts in 10 minutes"


def test_the_delay_between_restarts_is_bounded() -> None:
    """A process that ends every three minutes is restarted forever, after at most a minute."""
    restarts = Restarts(RULE)
    delays = [restarts.delay_s(-9, lived_s=180, now=180 * count) for count in range(20)]
    assert delays[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert delays[-1] == 60


def test_ten_minutes_of_runtime_reset_the_delay() -> None:
    """After ten minutes of runtime, the delay starts at its first value again."""
    restarts = Restarts(RULE)
    for now in range(3):
        restarts.delay_s(1, lived_s=1, now=now)
    assert restarts.delay_s(1, lived_s=600, now=700) == 1


def test_a_stopped_or_misconfigured_process_is_not_restarted() -> None:
    """There is no restart if the process was stopped, had a wrong option, or has the name of another process."""
    for exit_code in (0, 2, EXIT_DUPLICATE_WORKER):
        assert Restarts(RULE).delay_s(exit_code, lived_s=1000, now=0) is None


@given(st.lists(st.floats(0, 400), max_size=60))
def test_at_most_five_restarts_occur_in_ten_minutes(gaps: list[float]) -> None:
    """At most five restarts occur in any ten minutes."""
    restarts, now, at = Restarts(RULE), 0.0, []
    for gap in gaps:
        now += gap
        if restarts.delay_s(1, lived_s=gap, now=now) is not None:
            at.append(now)
    assert all(late - early >= RULE.window_s for early, late in zip(at, at[5:], strict=False))
