"""Token batching: tokens that arrive step by step for many requests leave as one run per request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.engine_step import MAX_RUN_BYTES, MAX_RUN_TOKENS, RequestStep, TokenBatch, TokenBatcher
from rollbus.schemas.errors import LocalProtocolError

NAMES = [f"r{i}" for i in range(100)]
ROW_SHAPE = (2, 3)


def batch_of(keys: list[str], step: int, starts: dict[str, int] | None = None, *, logprobs: bool = True) -> TokenBatch:
    """Return a batch whose token ids encode request and step, with rows from `starts` on if given."""
    numbers = np.array([1000 * NAMES.index(key) + step for key in keys], np.int32)
    return TokenBatch(
        keys=keys,
        token_ids=numbers,
        logprobs=-numbers.astype(np.float32) if logprobs else None,
        routed_experts=None if starts is None else np.repeat(numbers % 251, 6).astype(np.uint8).reshape(-1, *ROW_SHAPE),
        routed_experts_starts=None if starts is None else np.array([starts[key] for key in keys], np.int64),
    )


def check(run: RequestStep | None, key: str, steps: list[int], start: int | None) -> None:
    """Assert that the run contains exactly the request's tokens of these steps."""
    numbers = np.array([1000 * NAMES.index(key) + step for step in steps])
    np.testing.assert_array_equal(run.token_ids, numbers)
    np.testing.assert_array_equal(run.logprobs, -numbers)
    assert run.token_ids.dtype.name == "int32"
    assert run.logprobs.dtype.name == "float32"
    if start is None:
        assert run.routed_experts is None
    else:
        assert run.routed_experts.shape == (len(steps), *ROW_SHAPE)
        np.testing.assert_array_equal(run.routed_experts[:, 0, 0], numbers % 251)
        assert run.routed_experts_start == start


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99), max_size=3)), max_size=40),
    st.booleans(),
)
def test_each_run_equals_a_plain_list_of_its_tokens(script: list[tuple[set[int], set[int]]], has_rows: bool) -> None:
    """Each run equals a plain list of its tokens, whichever requests share steps and are popped."""
    gathering, expected = TokenBatcher(), dict[str, list[int]]()
    made = dict.fromkeys(NAMES, 10)
    for step, (present, popped) in enumerate(script):
        keys = [NAMES[i] for i in present]
        full = gathering.add(batch_of(keys, step, made if has_rows else None), 7)
        for key in keys:
            expected.setdefault(key, []).append(step)
            made[key] += 1
        assert full == []
        for key in [NAMES[i] for i in popped]:
            run, steps = gathering.pop(key), expected.pop(key, [])
            if steps:
                check(run, key, steps, made[key] - len(steps) if has_rows else None)
            else:
                assert run is None
    assert sorted(gathering.keys) == sorted(expected)
    assert len(gathering) == len(expected)
    for key, steps in expected.items():
        check(gathering.pop(key), key, steps, made[key] - len(steps) if has_rows else None)


def test_a_request_is_reported_when_its_run_is_full() -> None:
    """A request is reported when its run has no room for another token. The run is still a small chunk."""
    gathering = TokenBatcher()
    full: list[str] = []
    for step in range(MAX_RUN_TOKENS):
        assert full == []
        full = gathering.add(batch_of(["r1"], step), 0)
    assert full == ["r1"]

    wide = TokenBatch(
        keys=["r2"],
        token_ids=np.zeros(1, np.int32),
        routed_experts=np.zeros((1, 61, 8), np.uint16),
        routed_experts_starts=np.zeros(1, np.int64),
    )
    gathering.clear()
    count = 1
    while not gathering.add(wide, 0):
        wide.routed_experts_starts = np.array([count])
        count += 1
    run = gathering.pop("r2")
    assert len(run.token_ids) == count
    assert run.routed_experts.nbytes + run.token_ids.nbytes <= MAX_RUN_BYTES


def test_tokens_with_other_weights_rows_or_logprobs_are_not_batched_together() -> None:
    """Tokens with other weights, routed experts or logprobs are not batched together.

    The batched tokens must leave first.
    """
    gathering = TokenBatcher()
    assert gathering.takes(batch_of(["r1"], 0), 3)
    gathering.add(batch_of(["r1"], 0), 3)
    assert gathering.takes(batch_of(["r2"], 0), 3)
    assert not gathering.takes(batch_of(["r2"], 0), 4)
    assert not gathering.takes(batch_of(["r2"], 0, logprobs=False), 3)
    assert not gathering.takes(batch_of(["r2"], 0, {"r2": 0}), 3)
    assert gathering.weight_version == 3
    gathering.pop("r1")
    gathering.add(batch_of(["r2"], 0, {"r2": 0}), 4)
    assert gathering.weight_version == 4


def test_a_row_of_a_wrong_position_rejects_the_whole_batch() -> None:
    """A row of a wrong position or an array of a wrong length rejects the whole batch."""
    gathering = TokenBatcher()
    gathering.add(batch_of(["r1"], 0, {"r1": 5}), 0)
    with pytest.raises(LocalProtocolError, match="do not follow"):
        gathering.add(batch_of(["r1", "r2"], 1, {"r1": 7, "r2": 0}), 0)
    short = batch_of(["r1", "r2"], 1, {"r1": 6, "r2": 0})
    short.token_ids = short.token_ids[:1]
    with pytest.raises(LocalProtocolError, match="other lengths"):
        gathering.add(short, 0)

    assert gathering.keys == ["r1"]
    check(gathering.pop("r1"), "r1", [0], 5)


def test_later_tokens_do_not_change_a_run_that_has_left() -> None:
    """Later tokens do not change a run that has left."""
    gathering = TokenBatcher()
    gathering.add(batch_of(["r1"], 0), 0)
    run = gathering.pop("r1")
    gathering.add(batch_of(["r2"], 1), 0)
    check(run, "r1", [0], None)
    gathering.drop("r2")
    gathering.drop("r2")
    assert not gathering
