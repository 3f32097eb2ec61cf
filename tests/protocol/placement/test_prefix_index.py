"""Which worker's cache should contain the prefix of a prompt."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollbus.bus.protocol.queue.load import (
    MAX_AGE_S,
    PIECE_TOKENS,
    CacheId,
    PrefixIndex,
    PrefixScope,
    hint_hash,
    piece_hashes,
)
from tests.protocol.placement.worlds import prompt

SCOPES = (
    PrefixScope(),
    PrefixScope("adapter", 1),
    PrefixScope("adapter", 2),
    PrefixScope("other", 1),
    PrefixScope(None, 0, "salt"),
    PrefixScope("adapter", 1, "salt"),
)


def chain(names: list[int]) -> list[int]:
    """Return the hashes of a prompt whose pieces have these names. Each hash covers all earlier pieces."""
    return [hash(path) for path in accumulate(((name,) for name in names), lambda path, name: path + name)]


def index_of(*workers: str, **bounds: int) -> PrefixIndex:
    """Return an index that knows the caches of these workers since time 0."""
    index = PrefixIndex(**bounds)
    for worker in workers:
        index.update(CacheId(worker, "1", 0), None, 0)
    return index


@given(st.integers(0, 4 * PIECE_TOKENS), st.integers(0, 4 * PIECE_TOKENS))
def test_prompts_share_the_hashes_of_the_pieces_before_their_first_difference(common: int, length: int) -> None:
    """Two prompts have equal hashes for the whole pieces before their first different token."""
    first = prompt(1, length)
    second = np.concatenate([first[:common], prompt(2, max(length - common, 0)) + 1000])
    shared = min(common, length) // PIECE_TOKENS
    pieces, others = piece_hashes(first, PrefixScope()), piece_hashes(second, PrefixScope())

    assert len(pieces) == length // PIECE_TOKENS
    assert pieces[:shared] == others[:shared]
    assert set(pieces[shared:]).isdisjoint(others[shared:])


def test_hashes_depend_on_token_ids_and_not_on_the_memory_layout() -> None:
    """Equal token ids have equal hashes for any layout and integer type of the array."""
    token_ids = prompt(1)

    assert piece_hashes(np.repeat(token_ids, 2)[::2], PrefixScope()) == piece_hashes(token_ids, PrefixScope())
    assert piece_hashes(token_ids.astype(np.int64), PrefixScope()) == piece_hashes(token_ids, PrefixScope())


def test_adapters_versions_and_salts_share_no_hashes() -> None:
    """Each adapter, adapter version and salt has its own hashes of prompts and hints."""
    pieces = [piece for scope in SCOPES for piece in piece_hashes(prompt(1), scope)]
    hints = [hint_hash(kind, name, scope) for scope in SCOPES for kind in ("session", "group") for name in ("x", "y")]

    assert len({*pieces, *hints}) == len(pieces) + len(hints)


@pytest.mark.parametrize("new", [CacheId("a", "1", 1), CacheId("a", "2", 0)])
def test_a_new_epoch_or_incarnation_invalidates_the_recorded_pieces(new: CacheId) -> None:
    """A new epoch or incarnation invalidates the recorded pieces. Later records for the old cache have no effect."""
    index = index_of("a", "b")
    old, pieces = CacheId("a", "1", 0), chain([1, 2])
    index.record(old, pieces, 1)
    index.record(CacheId("b", "1", 0), pieces, 1)
    index.update(new, None, 2)
    index.record(old, pieces, 3)

    assert index.longest(pieces, 3) == {"b": 2 * PIECE_TOKENS}
    assert index.last_holder(pieces[-1], 3) == "b"
    index.record(new, pieces, 4)
    assert index.longest(pieces, 4) == {"a": 2 * PIECE_TOKENS, "b": 2 * PIECE_TOKENS}
    assert index.last_holder(pieces[-1], 4) == "a"


def test_an_announced_age_invalidates_pieces_that_were_last_used_earlier() -> None:
    """An announced age invalidates pieces that were last used earlier. A larger age later does not restore them."""
    index = index_of("a")
    cache = CacheId("a", "1", 0)
    index.record(cache, chain([1]), 10)
    index.record(cache, chain([2]), 20)
    index.update(cache, 15, 30)
    index.update(cache, 1000, 31)

    assert index.longest(chain([1]), 31) == {}
    assert index.longest(chain([2]), 31) == {"a": PIECE_TOKENS}
    assert index.longest(chain([2]), 21 + MAX_AGE_S) == {}


def test_the_last_piece_of_the_least_recently_used_prompt_is_removed_first() -> None:
    """At the limit, the last piece of the least recently used prompt is removed first."""
    index = index_of("a", max_pieces=4)
    cache = CacheId("a", "1", 0)
    index.record(cache, chain([1, 2]), 1)
    index.record(cache, chain([3, 4]), 2)
    index.record(cache, chain([1, 2]), 3)
    index.record(cache, chain([5]), 4)

    assert index.longest(chain([1, 2]), 5) == {"a": 2 * PIECE_TOKENS}
    assert index.longest(chain([3, 4]), 5) == {"a": PIECE_TOKENS}
    assert len(index) == 4


class PrefixIndexMachine(RuleBasedStateMachine):
    """An index and a plain table of the times at which each worker used each piece.

    A small range of piece names makes prompts share prefixes. With `is_colliding`, hashes can also be equal by chance;
    then the machine checks only that a found prefix is no longer than the prompt.
    """

    WORKERS = ("a", "b", "c")

    @initialize(
        max_pieces=st.sampled_from([3, 10, 1000]),
        max_holders=st.sampled_from([4, 10, 1000]),
        is_colliding=st.booleans(),
    )
    def begin(self, max_pieces: int, max_holders: int, *, is_colliding: bool) -> None:
        self.bounds = max_pieces, max_holders
        self.is_colliding = is_colliding
        self.index = PrefixIndex(max_pieces, max_holders)
        self.now = 0.0
        self.caches: dict[str, CacheId] = {}
        self.used: dict[str, dict[int, float]] = {worker: {} for worker in self.WORKERS}

    def pieces(self, names: list[int]) -> list[int]:
        return names if self.is_colliding else chain(names)

    @rule(worker=st.sampled_from(WORKERS), epoch=st.integers(0, 2), oldest=st.none() | st.floats(0, 5))
    def announce(self, worker: str, epoch: int, oldest: float | None) -> None:
        self.now += 1
        cache = CacheId(worker, "1", epoch)
        if self.caches.get(worker) != cache:
            self.used[worker].clear()
        self.caches[worker] = cache
        if oldest is not None:
            self.used[worker] = {piece: at for piece, at in self.used[worker].items() if at >= self.now - oldest}
        self.index.update(cache, oldest, self.now)

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.caches.pop(worker, None)
        self.used[worker].clear()
        self.index.remove(worker)

    @rule(worker=st.sampled_from(WORKERS), epoch=st.integers(0, 2), names=st.lists(st.integers(0, 2), max_size=6))
    def use(self, worker: str, epoch: int, names: list[int]) -> None:
        self.now += 1
        cache = CacheId(worker, "1", epoch)
        if self.caches.get(worker) == cache:
            self.used[worker].update(dict.fromkeys(self.pieces(names), self.now))
        self.index.record(cache, self.pieces(names), self.now)

    @rule(worker=st.sampled_from(WORKERS), name=st.integers(0, 2))
    def discard(self, worker: str, name: int) -> None:
        # A hint is not the beginning of a prompt.
        hint = hint_hash("group", str(name), PrefixScope())
        if worker in self.caches:
            self.index.record(self.caches[worker], (hint,), self.now)
            assert self.index.last_holder(hint, self.now) == worker
        self.index.discard(worker, hint)
        assert self.index.last_holder(hint, self.now) != worker

    @rule(names=st.lists(st.integers(0, 2), max_size=6))
    def look_up(self, names: list[int]) -> None:
        pieces = self.pieces(names)
        held = {worker: [piece in self.used[worker] for piece in pieces] for worker in self.WORKERS}
        expected = {worker: [*known, False].index(False) * PIECE_TOKENS for worker, known in held.items()}
        found = self.index.longest(pieces, self.now)
        if self.is_colliding:
            assert all(0 < tokens <= len(pieces) * PIECE_TOKENS for tokens in found.values())
            return
        if max(self.bounds) == min(self.bounds) == 1000:
            assert found == {worker: tokens for worker, tokens in expected.items() if tokens}
        assert all(0 < tokens <= expected[worker] for worker, tokens in found.items())

    @invariant()
    def is_bounded(self) -> None:
        holders = self.index._pieces.values()
        counts = {"pieces": len(self.index), "holders": self.index._num_holders, "pairs": sum(map(len, holders))}
        assert counts["pieces"] <= self.bounds[0]
        assert counts["pairs"] == counts["holders"] <= self.bounds[1]


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=100, stateful_step_count=40)
