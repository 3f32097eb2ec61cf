"""The silence of a peer whose sign stops changing, without the time in which the observer could not read."""

import pytest

from rollbus.bus.protocol.weights.chain import SIGN_S, Silence


def test_a_new_sign_resets_the_silence() -> None:
    """A new sign resets the silence, and silence lasts as long as the observer has read the same sign."""
    silence = Silence()
    signs = ((7, 100.0), (7, 101.0), (7, 103.0), (8, 104.0), (8, 105.0))

    assert [silence.record(sign, now) for sign, now in signs] == [0.0, 1.0, 3.0, 0.0, 1.0]


@pytest.mark.parametrize("outage_s", [60.0, 3600.0])
def test_an_outage_counts_as_one_period_of_silence(outage_s: float) -> None:
    """An outage counts as one period of silence, because the observer could not read the peer's sign."""
    silence = Silence()
    silence.record(7, 0.0)
    assert silence.record(7, outage_s) == SIGN_S
