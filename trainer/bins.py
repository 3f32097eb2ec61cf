"""Best-fit decreasing: which sequences share a micro-batch. Deterministic, O(n log n)."""

import heapq
from collections.abc import Sequence

__all__ = ["fit"]


def fit(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> list[list[int]]:
    """Put items into as few bins as best-fit decreasing finds.

    From the largest item to the smallest, each goes into the fullest bin that still takes it, or into a new one.
    Among equals the lower index and the older bin come first, so the same sizes always give the same bins.

    Args:
        sizes: of each item, 0 to `capacity`.
        capacity: what a bin may hold in sum.
        max_items: how many it may hold, 1 or more; None for any number.

    Returns:
        For each bin, oldest first, the indices of its items in ascending order.

    Raises:
        ValueError: an item that fits no bin.
    """
    bins: list[list[int]] = []
    # Heaps of (room, bin): those that can take the present item, least room first, and the others, most room first.
    # Sizes only fall, so a bin that is open to one item stays open until it is used, and each use moves it once.
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
