"""Best-fit decreasing bin packing matches its definition and needs less than quadratic time."""

import heapq
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.trainer.packing import fit


def naive_fit(sizes: list[int], capacity: int, max_items: int | None) -> list[list[int]]:
    """Implement best-fit decreasing by its definition, with a scan of all bins for each item."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rooms = [(capacity - sum(sizes[i] for i in members), at) for at, members in enumerate(bins)]
        fitting = [(room, at) for room, at in rooms if room >= sizes[index] and len(bins[at]) != max_items]
        if fitting:
            bins[min(fitting)[1]].append(index)
        else:
            bins.append([index])
    return [sorted(members) for members in bins]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 60), st.none() | st.integers(1, 4))
def test_the_heap_chooses_the_bins_of_best_fit_decreasing(
    sizes: list[int], capacity: int, max_items: int | None
) -> None:
    """The heap implementation chooses the same bins as a scan of all bins, also with ties."""
    assert fit(sizes, capacity, max_items) == naive_fit(sizes, capacity, max_items)


def test_bins_are_full_if_possible_and_equal_items_keep_their_order() -> None:
    """Bins are full if possible, equal items keep their order, and an item above the capacity is an error."""
    assert fit([5, 5, 3, 7, 2, 8], 10) == [[4, 5], [2, 3], [0, 1]]
    assert fit([1, 1, 1], 1) == [[0], [1], [2]]
    assert fit([5, 5, 3, 7, 2, 8], 20, 2) == [[3, 5], [0, 1], [2, 4]]
    assert fit([], 10) == []
    with pytest.raises(ValueError, match="item 1 is of size 11; allowed: 0 to 10"):
        fit([1, 11], 10)


def test_each_item_needs_at_most_four_heap_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item needs at most four heap operations, regardless of the number of bins, and no item is lost."""
    count, operations = 10_000, 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal operations
            operations += 1
            return function(*args)

        return call

    for name in ("heappush", "heappop"):
        monkeypatch.setattr(heapq, name, counted(getattr(heapq, name)))
    sizes = [1 + i * 7919 % 97 for i in range(count)]

    bins = fit(sizes, 100)

    assert operations <= 4 * count
    assert sorted(index for members in bins for index in members) == list(range(count))
    assert len(bins) <= 1.25 * math.ceil(sum(sizes) / 100)
