"""Counts how often the router chose each expert."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...schemas.rows import Rows

__all__ = ["COLUMNS", "count_experts", "expert_rows"]

NUM_EXPERTS_SHOWN = 3
"""Number of experts that the table names as most used, and as least used."""
COLUMNS = ("layer", "most used experts", "least used experts", "unused")


def count_experts(arrays: Iterable[Rows], num_layers: int, num_experts: int) -> npt.NDArray[np.int64]:
    """Count the choices of each expert over all positions.

    Args:
        arrays: u1 or <u2, [num_rows, num_layers, top_k] each.

    Returns:
        i8[num_layers, num_experts]
    """
    counts = np.zeros((num_layers, num_experts), np.int64)
    for rows in arrays:
        for layer in range(num_layers):
            counts[layer] += np.bincount(rows[:, layer].reshape(-1), minlength=num_experts)
    return counts


def expert_rows(counts: npt.NDArray[np.int64]) -> list[list[str]]:
    """Return the cells of `COLUMNS` for each layer. A share is a fraction of all choices in that layer."""
    rows = []
    for layer, of_layer in enumerate(counts):
        order = np.argsort(-of_layer, kind="stable")
        shares = [f"{expert} ({of_layer[expert] / max(of_layer.sum(), 1):.0%})" for expert in order]
        unused = int((of_layer == 0).sum())
        rows.append([str(layer), ", ".join(shares[:NUM_EXPERTS_SHOWN]), ", ".join(shares[-NUM_EXPERTS_SHOWN:]), str(unused)])
    return rows
