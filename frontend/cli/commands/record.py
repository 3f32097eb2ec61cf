"""Show what the record of a run has, and draw its picture. This needs no worker and no NATS.

Programs record with `rb.record(DIR)`, and `rollbus generate` with --record DIR. The picture has the lengths, the
staleness, the rewards and the throughput over time, and the updates of the weights. A record of a run that was killed,
or that still runs, is readable too: the command prints what is missing.
"""

import argparse
from pathlib import Path

from ....schemas.options import pip_install
from ..exits import CommandFailed, ExitCode

HELP = "show the record of a run, and draw its picture"
EXAMPLES = ("rollbus record run/", "rollbus record run/ --svg run.svg")
READS_NO_CREDENTIALS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the record")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="file for the picture (default: none)")


def run(args: argparse.Namespace) -> int:
    """Print the counts and problems of the record, and draw its picture."""
    import numpy as np

    from ....bus import read_record
    from ..console import note, print_json, write

    if args.svg is not None:
        _check_drawable()
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
        from ..records import draw

        draw(args.svg, record)
    if args.json:
        print_json(report)
        return ExitCode.OK
    scored = f", {report['scored']:,} with a reward" if report["scored"] else ""
    write(f"{record.num_samples:,} samples{scored}; {report['tokens']:,} tokens in {seconds:.1f} s")
    for problem in record.problems:
        write(f"problem: {problem}")
    if args.svg is not None:
        note(f"rollbus: the picture is in {args.svg}")
    return ExitCode.OK


def _check_drawable() -> None:
    try:
        import matplotlib  # noqa: F401 - checks that it is installed
    except ImportError as exc:
        raise CommandFailed(f"--svg requires {exc.name}, which is not installed: {pip_install('rl')}") from exc
