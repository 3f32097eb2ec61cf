"""A worker's counts of its experts, compared with a count of every row."""

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.telemetry.experts import (
    INTERVAL_S,
    KEPT_INTERVALS,
    MAX_PENDING_ROWS,
    MAX_WAITING_PARTS,
    ExpertBook,
    Plane,
    decode_counts,
    is_countable,
    merge_loads,
)
from rollbus.schemas.limits import MAX_EXPERT_CELLS, MAX_EXPERT_VERSIONS
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.rows import DTYPES, Rows, dtype_for
from rollbus.schemas.telemetry import ExpertLoad

ROUTING = RoutedExpertsInfo(num_layers=3, top_k=2, num_experts=6, dtype="u1")

UNIX = 1_700_000_000.0
"""Unix time at which an interval begins."""
FIRST = 340_000_000
"""Number of that interval."""
PROMPT: Plane = "prompt"
GENERATED: Plane = "generated"


class Add(NamedTuple):
    """Rows that arrive `after_s` seconds after the previous rows, with `unseen` more computed positions."""

    after_s: float
    plane: Plane
    weight_version: int
    num_rows: int
    unseen: int


adds = st.lists(
    st.builds(
        Add,
        st.sampled_from([0.0, 0.4, 4.9, 12.0, 70.0]),
        st.sampled_from(["prompt", "generated"]),
        st.integers(0, MAX_EXPERT_VERSIONS - 1),
        st.sampled_from([0, 1, 7, 511, 512, 1300]),
        st.integers(0, 3),
    ),
    max_size=30,
)


def rows_of(seed: int, count: int, routing: RoutedExpertsInfo = ROUTING) -> Rows:
    """Return random rows with distinct experts in each layer."""
    shape = count, routing.num_layers, routing.num_experts
    order = np.argsort(np.random.default_rng(seed).random(shape), axis=2)
    return order[:, :, : routing.top_k].astype(DTYPES[routing.dtype])


def expected_counts(rows: Rows, num_experts: int) -> np.ndarray:
    """Return the count of each expert in each layer."""
    return np.array([np.bincount(rows[:, i].ravel(), minlength=num_experts) for i in range(rows.shape[1])])


def counts_of(load: ExpertLoad) -> dict[tuple[int, Plane], tuple[np.ndarray, int, int]]:
    """Return counts, computed and seen positions of each version and plane that has any."""
    found: dict[tuple[int, Plane], tuple[np.ndarray, int, int]] = {}
    shape = load.num_layers, load.num_experts
    for version in load.counts:
        for data, tally, plane in (
            (version.prompt, version.prompt_tokens, PROMPT),
            (version.generated, version.generated_tokens, GENERATED),
        ):
            if tally.computed:
                found[version.weight_version, plane] = decode_counts(data, *shape), tally.computed, tally.seen
    return found


@settings(deadline=None)
@given(adds, st.integers(-30, 30), st.sampled_from([0.0, 1.5, 4.9]))
def test_every_row_is_counted_once_in_its_interval_and_version(items: list[Add], after: int, begun_s: float) -> None:
    """For any order of planes, versions and pauses, a reader receives exactly the counts of the intervals' rows."""
    unix = UNIX + begun_s
    book, now = ExpertBook(ROUTING, 100.0, unix), 100.0
    expected: dict[int, dict[tuple[int, Plane], list[tuple[Rows, int]]]] = defaultdict(lambda: defaultdict(list))
    for seed, item in enumerate(items):
        now += item.after_s
        rows = rows_of(seed, item.num_rows)
        book.add_computed(item.plane, len(rows) + item.unseen, item.weight_version, now)
        book.add_rows(item.plane, rows, item.weight_version, now)
        book.count_some()
        if item.num_rows + item.unseen:
            interval = int((now + (unix - 100.0)) / INTERVAL_S)
            expected[interval][item.weight_version, item.plane].append((rows, item.unseen))
    number = int((now + (unix - 100.0)) / INTERVAL_S) - 1
    load = book.load(number + after, "recent", now)

    first = min(max(number + after + 1, number - KEPT_INTERVALS + 1, int(unix / INTERVAL_S)), number + 1)
    assert (load.number, load.first) == (number, first)
    seconds = max((number + 1) * INTERVAL_S - max(first * INTERVAL_S, unix), 0.0)
    assert load.seconds == pytest.approx(seconds, abs=0.001)
    wanted: dict[tuple[int, Plane], list[tuple[Rows, int]]] = defaultdict(list)
    for interval in range(first, number + 1):
        for key, parts in expected[interval].items():
            wanted[key] += parts
    found = counts_of(load)
    assert found.keys() == wanted.keys()
    for key, (counts, computed, seen) in found.items():
        rows = np.concatenate([part for part, _ in wanted[key]])
        assert (counts == expected_counts(rows, ROUTING.num_experts)).all()
        assert (computed, seen) == (len(rows) + sum(unseen for _, unseen in wanted[key]), len(rows))


def test_the_book_keeps_the_last_eight_versions_newest_first() -> None:
    """The book keeps the last 8 used versions, the newest first.

    An interval's counts are available after it has ended.
    """
    book = ExpertBook(ROUTING, 0.0, UNIX)
    for version in range(12):
        for part in range(2):
            book.add_computed("generated", 10, version, 100.0 * version + part)
            book.add_rows("generated", rows_of(version, 10), version, 100.0 * version + part)
    early, late = book.load(0, "versions", 1104.0), book.load(0, "versions", 1105.0)

    assert [counts.weight_version for counts in early.counts] == [10, 9, 8, 7, 6, 5, 4, 3]
    assert [counts.weight_version for counts in late.counts] == [11, 10, 9, 8, 7, 6, 5, 4]
    assert Counter(counts.generated_tokens.seen for counts in late.counts) == {20: 8}
    assert late.first == FIRST
    assert late.seconds == 1105.0


def test_a_long_prompt_waits_to_be_counted() -> None:
    """The rows of a long prompt are counted in parts when the caller asks for it. Only a bounded number waits."""
    book = ExpertBook(ROUTING, 0.0, UNIX)
    book.add_rows("prompt", rows_of(0, (MAX_WAITING_PARTS + 2) * MAX_PENDING_ROWS + 1), 1, 1.0)
    assert len(book.waiting) == MAX_WAITING_PARTS


def test_an_answer_is_computed_once_per_interval() -> None:
    """An answer is computed once per interval, so a flood of reads costs no compression."""
    book = ExpertBook(ROUTING, 0.0, UNIX)
    book.add_rows("prompt", rows_of(0, 10), 1, 1.0)

    assert book.load(0, "recent", 5.0) is book.load(0, "recent", 9.9)
    assert book.load(0, "recent", 9.9) is not book.load(0, "recent", 10.0)
    assert book.load(FIRST, "recent", 10.0).counts == ()
    assert book.load(0, "recent", 10.0).counts[0].prompt_tokens.seen == 10


def test_rows_that_do_not_fit_the_model_are_not_counted() -> None:
    """Rows with another model's shape are ignored. A row with an expert that the model lacks counts as not seen."""
    book = ExpertBook(ROUTING, 0.0, UNIX)
    bad = rows_of(0, 4)
    bad[2, 1, 0] = 6
    book.add_rows("prompt", bad, 1, 1.0)
    book.add_rows("prompt", bad[:, :2], 1, 1.0)
    book.add_rows("prompt", bad.astype("<u2"), 1, 1.0)
    window, left_out = merge_loads({"w": book.load(0, "recent", 5.0)})

    assert not left_out
    assert window.prompt.seen == 3
    assert (window.prompt.counts == expected_counts(bad[[0, 1, 3]], 6)).all()


def test_models_whose_cells_need_wide_numbers_are_counted() -> None:
    """Models whose cells (layer and expert) need two- or four-byte numbers are counted up to the limit.

    A model above the limit is not.
    """
    for num_layers, num_experts in ((61, 384), (4, MAX_EXPERT_CELLS // 4), (1, 256), (2, 1)):
        dtype = dtype_for(num_experts)
        routing = RoutedExpertsInfo(num_layers=num_layers, top_k=1, num_experts=num_experts, dtype=dtype)
        book = ExpertBook(routing, 0.0, UNIX)
        rows = np.random.default_rng(1).integers(0, num_experts, (700, num_layers, 1)).astype(DTYPES[dtype])
        book.add_rows("generated", rows, 1, 0.0)
        [counts] = book.load(0, "recent", 5.0).counts

        assert is_countable(routing)
        assert (decode_counts(counts.generated, num_layers, num_experts) == expected_counts(rows, num_experts)).all()
    assert not is_countable(RoutedExpertsInfo(num_layers=5, top_k=1, num_experts=65_536, dtype="<u2"))


def test_rows_with_invalid_expert_ids_do_not_affect_later_rows() -> None:
    """Rows with invalid expert ids are not counted and do not affect later rows, also if no other rows are buffered."""
    book = ExpertBook(ROUTING, 0.0, UNIX)
    bad = np.full((1, ROUTING.num_layers, ROUTING.top_k), 255, np.uint8)
    book.add_rows(GENERATED, bad, 1, 0.0)
    book.add_computed(GENERATED, 1, 1, 0.0)
    assert book.load(0, "recent", INTERVAL_S).counts[0].generated_tokens.seen == 0
    book.add_rows(GENERATED, rows_of(1, 2), 1, INTERVAL_S)
    assert book.load(0, "recent", 2 * INTERVAL_S).counts[0].generated_tokens.seen == 2
