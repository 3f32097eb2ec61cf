"""The token rates of an engine: measured times, weights and omitted steps."""

from typing import Any

import pytest

from rollbus.workers.engines.rates import MEMORY_S, MIN_PREFILL, TokenRates


def both(rates: TokenRates) -> Any:
    """Return the prefill and decode rates, to compare them with approximations."""
    return rates.prefill, rates.decode


def test_an_unknown_rate_is_none() -> None:
    """An unknown rate is None, not 0."""
    rates = TokenRates()
    assert rates.prefill is None
    assert rates.decode is None


def test_prefill_and_decode_are_measured_separately() -> None:
    """A prefill counts from its scheduling to its first token. Decoding counts the steps of later tokens."""
    rates = TokenRates()
    rates.add_prefill(1000, 100.0)
    rates.end_step(100.5, 0)
    assert both(rates) == (pytest.approx(2000), None)
    rates.end_step(100.6, 4)
    rates.end_step(100.7, 4)
    assert both(rates) == (pytest.approx(2000), pytest.approx(40))


def test_idle_time_changes_nothing() -> None:
    """Idle time does not count as computing time."""
    rates = TokenRates()
    for begin in (100.0, 3700.0):
        rates.add_prefill(1000, begin)
        rates.end_step(begin + 0.5, 0)
        rates.end_step(begin + 0.6, 8)
    assert rates.prefill == pytest.approx(2000)
    assert rates.decode == pytest.approx(80)


def test_the_time_of_a_chunked_prompt_begins_with_its_first_chunk() -> None:
    """The time of a chunked prompt begins with its first chunk, however many steps of other requests end meanwhile."""
    rates = TokenRates()
    rates.end_step(100.0, 0)
    for number in range(1, 5):
        rates.end_step(100.0 + number / 10, 2)
    rates.add_prefill(800, 100.1)
    rates.end_step(100.5, 2)
    assert rates.prefill == pytest.approx(2000)


def test_long_prompts_outweigh_short_prompts() -> None:
    """Long prompts outweigh short ones: a few tokens beside a decoding batch show little of the prefill rate."""
    rates = TokenRates()
    rates.add_prefill(4000, 100.0)
    rates.end_step(100.4, 0)
    for number in range(20):
        rates.add_prefill(16, 101.0 + number)
        rates.end_step(101.05 + number, 0)
    assert rates.prefill == pytest.approx(10_000, rel=0.1)


def test_a_step_with_few_prompt_tokens_measures_no_prefill_rate() -> None:
    """A worker that has computed only canaries has no prefill rate: a low one would make it seem slow to clients."""
    rates = TokenRates()
    rates.add_prefill(MIN_PREFILL - 1, 100.0)
    rates.end_step(100.01, 0)
    assert rates.prefill is None
    # The time of that step does not count for the next prompt, which was scheduled during it.
    rates.add_prefill(1000, 100.0)
    rates.end_step(100.11, 0)
    assert rates.prefill == pytest.approx(10_000)


def test_old_measurements_fade_with_the_computing_time() -> None:
    """After several times `MEMORY_S` of computing, only the current rate counts."""
    rates = TokenRates()
    rates.end_step(0.0, 0)
    for number in range(1, 100):
        rates.end_step(float(number), 10)
    fast_from = 99.0
    for number in range(1, int(5 * MEMORY_S)):
        rates.end_step(fast_from + number, 100)
    assert rates.decode == pytest.approx(100, rel=0.02)


def test_steps_and_prompts_around_a_pause_do_not_count() -> None:
    """The step after a pause and a prompt that was scheduled before it do not count."""
    rates = TokenRates()
    rates.end_step(100.0, 0)
    rates.end_step(100.1, 4)
    rates.interrupt(100.15)
    rates.add_prefill(1000, 100.12)
    rates.end_step(200.0, 4)
    assert both(rates) == (None, pytest.approx(40))
    rates.add_prefill(1000, 200.0)
    rates.end_step(200.1, 4)
    assert both(rates) == (pytest.approx(10_000), pytest.approx(40))


def test_steps_at_the_same_time_give_no_measurement() -> None:
    """Steps at the same time give no measurement."""
    rates = TokenRates()
    rates.add_prefill(10, 100.0)
    rates.end_step(100.0, 0)
    rates.end_step(100.0, 5)
    assert both(rates) == (None, None)
