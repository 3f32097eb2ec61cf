"""Best-fit decreasing: chooses the sequences that share a micro-batch. Deterministic, O(n log n)."""

import heapq
from collections.abc import Sequence

__all__ = ["fit"]


def fit(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> list[list[int]]:
    """Put items into bins with the best-fit decreasing heuristic.

    From the largest item to the smallest, each item goes into the fullest bin with enough room, or into a new bin.
    Among equal candidates, the lower index and the older bin come first, so the same sizes always give the same bins.

    Args:
        sizes: size of each item, 0 to `capacity`.
        capacity: maximum sum of the sizes in a bin.
        max_items: maximum number of items in a bin, at least 1. None: no limit.

    Returns:
        For each bin, oldest first, the indices of its items in ascending order.

    Raises:
        ValueError: an item fits into no bin.
    """
    bins: list[list[int]] = []
    # Heaps of (room, bin): bins with room for the present item, least room first, and the others, most room first.
    # Sizes only decrease, so an open bin stays open until an item goes into it. Each item moves one bin once.
    open_bins: list[tuple[int, int]] = []
    full_bins: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        size = sizes[index]
        if not 0 <= size <= capacity:
            raise ValueError(f"item {index} is of size {size}; allowed: 0 to {capacity}")
        while full_bins and -full_bins[0][0] >= size:
            room, bin_index = heapq.heappop(full_bins)
            heapq.heappush(open_bins, (-room, bin_index))
        if open_bins:
            room, bin_index = heapq.heappop(open_bins)
        else:
            room, bin_index = capacity, len(bins)
            bins.append([])
        bins[bin_index].append(index)
        if len(bins[bin_index]) != max_items:
            heapq.heappush(full_bins, (size - room, bin_index))
    for members in bins:
        members.sort()
    return bins
