"""The age of the oldest prefix, computed from the engine's tokens, compared with a cache that evicts the least used."""

import random
from collections import OrderedDict

import pytest

from rollbus.workers.engines.rates import NUM_SPANS, PrefixAge

BLOCK = 16
NUM_BLOCKS = 256
CAPACITY = NUM_BLOCKS * BLOCK


def test_the_age_is_unknown_until_the_cache_was_filled_once() -> None:
    """No age is known until the cache was filled once.

    From then on, the age is that of the oldest of the last tokens that fill the cache. It grows while no token is
    computed.
    """
    age = PrefixAge(CAPACITY, BLOCK)
    for second in range(10):
        assert age.oldest_s(float(second)) is None
        age.add(CAPACITY // 10 + BLOCK, float(second), num_begun=1)
    age.add(CAPACITY // 10, 10.0)
    assert age.oldest_s(10.0) == 10.0
    age.add(CAPACITY // 2, 11.0)
    assert age.oldest_s(11.0) == pytest.approx(5.0, abs=1.0)
    assert age.oldest_s(21.0) == pytest.approx(15.0, abs=1.0)


def test_requests_that_fill_no_block_do_not_age_the_cache() -> None:
    """Requests that fill no block reuse the last partial block, so they do not age the cache.

    Their uncounted tokens are bounded by one capacity.
    """
    age = PrefixAge(CAPACITY, BLOCK)
    for second in range(100_000):
        age.add(3, float(second), num_begun=1)
        age.add(5, float(second))
    assert age.oldest_s(1e5) is None
    age.add(2 * CAPACITY + BLOCK, 2e5, num_begun=1)
    assert age.oldest_s(2e5) == 0.0


def test_many_small_steps_use_bounded_memory() -> None:
    """The memory is bounded, however many steps make up the tokens of the cache."""
    age = PrefixAge(CAPACITY, BLOCK)
    for step in range(50 * CAPACITY):
        age.add(1, step / 100)
    assert len(age._spans) <= NUM_SPANS + 1
    oldest_s = age.oldest_s(50 * CAPACITY / 100)
    assert oldest_s == pytest.approx(CAPACITY / 100, rel=2 / NUM_SPANS)


@pytest.mark.parametrize("seed", range(5))
def test_older_prefixes_are_evicted_and_much_younger_prefixes_are_cached(seed: int) -> None:
    """Older prefixes are evicted and much younger ones are cached.

    The cache has no running requests, and a third of the prompts of any length repeat.
    """
    rng = random.Random(seed)
    age, cache = PrefixAge(CAPACITY, BLOCK), OrderedDict[tuple[int, int], float]()
    lengths: list[int] = []
    told = 0
    for now in map(float, range(3_000)):
        known = rng.randrange(len(lengths)) if lengths and rng.random() < 0.3 else len(lengths)
        if known == len(lengths):
            lengths.append(rng.randrange(1, 400))
        blocks = [(known, number) for number in range(lengths[known] // BLOCK)]
        num_cached = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks)) * BLOCK
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = now
        while len(cache) > NUM_BLOCKS:
            cache.popitem(last=False)
        age.add(lengths[known] - num_cached, now, num_begun=1)
        oldest_s = age.oldest_s(now)
        if oldest_s is not None:
            told += 1
            truth = now - next(iter(cache.values()))
            assert truth <= oldest_s <= 3 * truth + 5
    assert told > 2_500
