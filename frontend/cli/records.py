"""Draws the picture of a run from its record as SVG. This needs matplotlib, which the extra `rl` installs."""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...bus import RunRecord, read_record
from .console import note, print_result
from .exits import ExitCode
from .options import check_drawable

MAX_BINS = 200
"""Most points of a line, so that the picture of a long run stays small."""

Numbers = npt.NDArray[np.float64]


def draw(path: Path, record: RunRecord) -> None:
    """Write an SVG of lengths, staleness, rewards and throughput over time. Vertical lines are updates of the weights.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    names = ("ended_at", "num_tokens", "lag", "reward", "newest_version")
    ended_at, lengths, lag, rewards, versions = (record.column(name) for name in names)
    times = ended_at - record.column("opened_at").min(initial=np.inf)
    bins = np.linspace(0, max(times.max(initial=0.0), 1e-3), min(MAX_BINS, max(len(times) // 8, 1)) + 1)
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True)
    for panel, values, label in zip(
        panels, (lengths, lag, rewards), ("tokens", "versions behind", "reward"), strict=False
    ):
        middles = (bins[1:] + bins[:-1]) / 2
        for percent, style in ((50, "-"), (95, ":")):
            panel.plot(middles, _percentile(times, values, bins, percent), style, color="C0", label=f"{percent} %")
        panel.set(ylabel=label)
        panel.legend(loc="upper left", fontsize="x-small")
    tokens = np.histogram(times, bins, weights=lengths)[0] / np.diff(bins)
    panels[3].stairs(tokens, bins, color="C0")
    panels[3].set(ylabel="tokens / s", xlabel="seconds")
    updates = _updates(times, versions)
    for panel in panels:
        for at in updates:
            panel.axvline(at, color="0.8", linewidth=0.8, zorder=0)
    figure.suptitle(
        f"{record.num_samples:,} samples, {int(lengths.sum()):,} tokens, {len(updates)} updates of the weights"
    )
    figure.savefig(path, format="svg", metadata={"Date": None})


def _percentile(times: Numbers, values: Numbers, bins: Numbers, percent: float) -> Numbers:
    """Return a percentile of the known values in each bin, NaN in an empty one."""
    places = np.clip(np.digitize(times, bins) - 1, 0, len(bins) - 2)
    known = [values[(places == place) & ~np.isnan(values)] for place in range(len(bins) - 1)]
    return np.array([np.percentile(found, percent) if len(found) else np.nan for found in known])


def _updates(times: Numbers, versions: Numbers) -> Numbers:
    """Return the times of the first samples of each newer version."""
    order = np.argsort(times, kind="stable")
    newest = np.fmax.accumulate(versions[order]) if len(order) else versions
    return times[order][1:][np.diff(newest) > 0]


def run(args: argparse.Namespace) -> int:
    """Print the counts and problems of the record, and draw its picture."""
    if args.svg is not None:
        check_drawable("--svg")
    record = read_record(args.directory)
    lengths, opened_at, ended_at = (record.column(name) for name in ("num_tokens", "opened_at", "ended_at"))
    seconds = float(ended_at.max() - opened_at.min()) if len(lengths) else 0.0
    report = {
        "samples": record.num_samples,
        "tokens": int(lengths.sum()),
        "seconds": round(seconds, 3),
        "scored": int(np.isfinite(record.column("reward")).sum()),
        "torn_bytes": record.torn_bytes,
        "problems": record.problems,
        "svg": None if args.svg is None else str(args.svg),
    }
    if args.svg is not None:
        draw(args.svg, record)
    scored = f", {report['scored']:,} with a reward" if report["scored"] else ""
    line = f"{record.num_samples:,} samples{scored}; {report['tokens']:,} tokens in {seconds:.1f} s"
    print_result(args, report, line, *(f"problem: {problem}" for problem in record.problems))
    if args.svg is not None and not args.json:
        note(f"rollbus: the picture is in {args.svg}")
    return ExitCode.OK
