"""Draws the load of experts into a PNG. This needs matplotlib, which the extra `rl` installs."""

from pathlib import Path

import numpy as np

from ...bus.protocol.telemetry.expert_window import ExpertWindow, PlaneLoad, imbalance

__all__ = ["draw"]

MAX_RATIO = 8.0
"""Largest ratio of a share to an even share on the scale of colours. The smallest is 1 / MAX_RATIO.

A ratio beyond the scale has the last colour."""


def draw(path: Path, window: ExpertWindow, plane: PlaneLoad, title: str) -> None:
    """Write a PNG with a map of each share divided by an even share. Beside it is the imbalance of each layer.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    num_layers, num_experts, top_k = window.shape
    totals = np.maximum(plane.counts.sum(axis=1, keepdims=True), 1)
    ratios = np.maximum(plane.counts * num_experts / totals, 1 / MAX_RATIO)
    figure = Figure(figsize=(12, max(num_layers / 8, 3)), layout="constrained")
    heat, bars = figure.subplots(1, 2, width_ratios=(5, 1), sharey=True)
    norm = LogNorm(1 / MAX_RATIO, MAX_RATIO)
    image = heat.imshow(ratios, norm=norm, cmap="RdBu_r", aspect="auto", interpolation="nearest")
    heat.set(title=title, xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=heat, label="share / even share", location="bottom", shrink=0.4)
    bars.barh(np.arange(num_layers), imbalance(plane.counts, top_k).max_over_mean, color="0.4")
    bars.set(xlabel="max / mean")
    figure.savefig(path, format="png", dpi=100)
