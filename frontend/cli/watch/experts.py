"""The load of experts as text, as JSON and as a PNG.

The text has a line for each layer and a column for each expert. The character of an expert shows the ratio of its share
of the choices to an even share. A PNG needs matplotlib, which the extra `rl` installs.
"""

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from ....bus import ExpertAnswers
from ....bus.protocol.telemetry.experts import Counts, ExpertWindow, PlaneLoad, VersionLoad, imbalance
from ....schemas.checks import list_names
from ....schemas.decoding import JsonObject
from ..console import note, print_json, write
from ..exits import CommandFailed, ExitCode
from ..options import check_drawable, connect, refuse_options
from ..tables import print_table, print_text, printable


def answers_as_json(answers: ExpertAnswers) -> JsonObject:
    """Return all counts and the imbalance of each layer.

    Without a usable answer, return only the asked workers and the reason why each answer is missing.
    """
    window = answers.window
    found: JsonObject = {
        "model": answers.model,
        "workers_total": answers.num_workers,
        "workers_asked": list(answers.asked),
        "workers_answered": [] if window is None else list(window.workers),
        "left_out": answers.left_out,
    }
    if window is None:
        return found

    def planes(load: ExpertWindow | VersionLoad) -> dict[str, JsonObject]:
        return {"prompt": _plane(load.prompt, top_k), "generated": _plane(load.generated, top_k)}

    top_k = window.shape.top_k
    return {
        **found,
        "seconds": window.seconds,
        **window.shape._asdict(),
        "planes": planes(window),
        "versions": [{"weight_version": version.weight_version, **planes(version)} for version in window.versions],
    }


def _plane(plane: PlaneLoad, top_k: int) -> JsonObject:
    found = imbalance(plane.counts, top_k)
    return {
        "computed": plane.computed,
        "seen": plane.seen,
        "counts": plane.counts.tolist(),
        "max_over_mean": found.max_over_mean.round(6).tolist(),
        "entropy": found.entropy.round(6).tolist(),
        "unused": found.unused.tolist(),
        "routes": found.routes.tolist(),
    }


SHADES: Final = " .:-=+*#%@"
"""Characters by load. The first means no choice. The second means an eighth of an even share, and each next one doubles
the load."""
LEGEND: Final = "share / even share: ' ' none, '-' half, '=' even, '+' 2 times, '*' 4, '#' 8, '%' 16, '@' more"
EVEN: Final = SHADES.index("=")
RIGHT_TITLE: Final = "  max/mean  entropy  unused"
VERSION_COLUMNS = ("weights", "plane", "tokens", "seen", "max/mean", "worst layer", "entropy", "unused")


def map_lines(counts: Counts, top_k: int, width: int) -> list[str]:
    """Draw a map that fits `width` columns, with the imbalance of each layer at the end of its line.

    If there are more experts than columns, one character shows the busiest of several experts. The first line states
    how many. The line of a layer without a router or without tokens has a text instead of the imbalance.
    """
    num_layers, num_experts = counts.shape
    digits = len(str(num_layers - 1))
    room = max(width - digits - len(" ||") - len(RIGHT_TITLE), 8)
    per_cell = math.ceil(num_experts / room)
    found = imbalance(counts, top_k)
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ratios = np.maximum.reduceat(counts * num_experts / totals, np.arange(0, num_experts, per_cell), axis=1)
    title = f"{num_experts} experts" if per_cell == 1 else f"{num_experts} experts, the busiest of each {per_cell}"
    lines = [f"{'':{digits}} |{title[: ratios.shape[1]]:{ratios.shape[1]}}|{RIGHT_TITLE}"]
    if len(title) > ratios.shape[1]:
        lines = [title, f"{'':{digits}} |{'':{ratios.shape[1]}}|{RIGHT_TITLE}"]
    for layer in range(num_layers):
        right = "  does not route" if counts[layer].any() else "  no tokens"
        cells = " " * ratios.shape[1]
        if found.routes[layer]:
            cells = "".join(_shade(ratio) for ratio in ratios[layer])
            right = f"{found.max_over_mean[layer]:10.2f}{found.entropy[layer]:9.3f}{found.unused[layer]:8d}"
        lines.append(f"{layer:{digits}d} |{cells}|{right}")
    return lines


def _shade(ratio: float) -> str:
    """Return the character for the ratio of a share to an even share."""
    if not ratio:
        return SHADES[0]
    return SHADES[min(max(EVEN + round(math.log2(ratio)), 1), len(SHADES) - 1)]


def share_text(plane: PlaneLoad) -> str:
    """Return the share of the computed positions whose routed experts were seen, or a dash if it is unknown."""
    return "-" if plane.share_seen is None else f"{plane.share_seen:.0%}"


def version_rows(versions: Sequence[VersionLoad], top_k: int) -> list[list[str]]:
    """Return the cells of `VERSION_COLUMNS` for each plane with tokens, the highest version first."""
    rows = []
    for version in versions:
        for name, plane in (("prompt", version.prompt), ("generated", version.generated)):
            if plane.computed or plane.seen:
                one = imbalance(plane.counts, top_k).summary()
                numbers = [f"{one.max_over_mean:.2f}", f"{one.worst:.2f}", f"{one.entropy:.3f}", str(one.unused)]
                rows.append([str(version.weight_version), name, f"{plane.computed:,}", share_text(plane), *numbers])
    return rows


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


MAX_NAMED = 8
"""Maximum number of workers without counts that are listed with their reasons. --json lists all of them."""


async def run(args: argparse.Namespace) -> int:
    """Ask the workers and print their counts."""
    if args.png is not None:
        check_drawable("--png")
    elif args.json:
        refuse_options(args, ["plane"], "with --json, which has both")
    async with connect(args) as rb:
        last_s = None if args.versions else args.last_s
        answers = await rb.fleet.experts(args.model, workers=args.only_workers, last_s=last_s, timeout_s=args.timeout_s)
    window = answers.window
    if window is not None:
        plane = {"prompt": window.prompt, "generated": window.generated}.get(args.plane)
        plane = window.prompt + window.generated if plane is None else plane
        what = "all tokens" if args.plane == "both" else f"{args.plane} tokens"
        when = "of the last versions" if args.versions else f"of {window.seconds:.0f} s"
        workers = f"{len(window.workers)} of {answers.num_workers} workers"
        title = f"{answers.model}: {what} {when}, {workers}; {window.shape}"
        if args.png is not None:
            draw(args.png, window, plane, title)
            note(f"rollbus: the map is in {args.png}")
        if not args.json:
            _show(title, window, plane, has_versions=args.versions)
    if args.json:
        print_json(answers_as_json(answers))
    left_out = [f"{worker}: {why}" for worker, why in sorted(answers.left_out.items())]
    named = list_names(left_out, "; ", MAX_NAMED)
    if window is None:
        raise CommandFailed(f"no worker of {answers.model} has counted experts: {named}")
    if left_out:
        note(f"rollbus: not counted: {printable(named)}")
        return ExitCode.PARTIAL
    return ExitCode.OK


def _show(title: str, window: ExpertWindow, plane: PlaneLoad, *, has_versions: bool) -> None:
    print_text(title)
    for name, one in (("prompt", window.prompt), ("generated", window.generated)):
        write(f"{name}: {one.computed:,} tokens computed, {share_text(one)} of them seen")
    if not plane.seen:
        write("no routed experts were seen in that time")
        return
    if has_versions:
        print_table(VERSION_COLUMNS, version_rows(window.versions, window.shape.top_k))
    for line in (*map_lines(plane.counts, window.shape.top_k, shutil.get_terminal_size().columns), LEGEND):
        write(line)
