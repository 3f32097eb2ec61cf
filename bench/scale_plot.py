"""Draws the figure of `bench.scale`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollbus.frontend.cli.tables import Spread

Row = Mapping[str, Any]
SIDES = {"worker": "#1f77b4", "client": "#d95f02", "server": "#4d4d4d"}


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw the rows of fleets and backlogs as SVG. Equal rows give equal bytes."""
    mpl.rcParams.update({"svg.hashsalt": "rollbus", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9})
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 3)
    shapes = _shapes(rows)
    top = 1.1 * max((number(row[f"{side}_ms"]) for row in rows if row["part"] == "fleet" for side in SIDES), default=1)
    for place, (shape, members) in zip(axes[0], shapes.items(), strict=True):
        place.set_title(f"the same load, more {shape}")
        for side, color in SIDES.items():
            place.plot(_sizes(members), [number(row[f"{side}_ms"]) for row in members], ".-", color=color, label=side)
        _finish(place, shape, "CPU ms a request", top)
        place.legend()
    idle, cpu, memory = axes[1]
    idle.set_title("a fleet with nothing to do")
    for (shape, members), line in zip(shapes.items(), ("-", "--", ":"), strict=True):
        values = [sum(number(row[f"{side}_idle"]) for side in SIDES) for row in members]
        idle.plot(_sizes(members), values, line, color="black", marker=".", label=f"more {shape}")
    idle.legend()
    _finish(idle, "workers, clients, or each", "CPU ms a second, all sides")
    cpu.set_title("a backlog")
    _slices(cpu, rows, "ms", "CPU ms a request")
    memory.set_title("memory meanwhile")
    _slices(memory, rows, "mb", "MB")
    figure.savefig(file, format="svg", metadata={"Date": None})


def _shapes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of the fleets by the side that grows."""
    fleets = [row for row in rows if row["part"] == "fleet"]
    return {
        "workers": [row for row in fleets if row["clients"] == 1],
        "clients": [row for row in fleets if row["workers"] == 1],
        "workers and clients": [row for row in fleets if row["workers"] == row["clients"]],
    }


def _sizes(fleets: Sequence[Row]) -> list[float]:
    return [max(number(row["workers"]), number(row["clients"])) for row in fleets]


def _slices(axes: Axes, rows: Sequence[Row], figure: str, label: str) -> None:
    """Draw the parts of the backlog one after the other on one axis."""
    first = 0.0
    for part in ("queueing", "draining", "passing"):
        members = [row for row in rows if row["part"] == part]
        if not members:
            continue
        places = [first + number(row["at"]) for row in members]
        for side, color in SIDES.items():
            values = [number(row[f"{side}_{figure}"]) for row in members]
            axes.plot(places, values, ".-", color=color, label=side if first == 0 else None)
        axes.annotate(part, ((first + places[-1]) / 2, 0.93), xycoords=("data", "axes fraction"), ha="center")
        first = places[-1]
        axes.axvline(first, color="#cccccc", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    _finish(axes, "requests", label, top=1.15 * axes.get_ylim()[1])


def _finish(axes: Axes, x: str, y: str, top: float | None = None) -> None:
    if x != "requests":
        axes.set_xscale("log", base=4)
        axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axes.minorticks_off()
    axes.set_ylim(0, top)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def number(value: Any) -> float:
    """Return a figure as one number: the median of a spread, as an object or from JSON."""
    if isinstance(value, Spread):
        return value.median
    return float(value["median"] if isinstance(value, dict) else value)
