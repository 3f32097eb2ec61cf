"""Show how often the router chose each expert: a map of layers by experts, and the imbalance of each layer.

Workers count the positions that their engines compute, in intervals of 5 s: generated tokens, and prompt tokens that
are not cached. The command asks up to 64 workers of the model. If some workers do not answer, it names them and exits
with 3.
"""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ....schemas.options import duration, pip_install
from ..exits import CommandFailed, ExitCode
from ..options import refuse_options

if TYPE_CHECKING:
    from ....bus import ExpertAnswers
    from ....bus.protocol.telemetry.experts import ExpertWindow, PlaneLoad


HELP = "show how often the router chose each expert"
EXAMPLES = (
    "rollbus experts",
    "rollbus experts --plane generated --last-s 10",
    "rollbus experts --versions",
    "rollbus experts --png experts.png",
)
PLANES = ("both", "prompt", "generated")
MAX_NAMED = 8
"""Maximum number of workers without counts that are listed with their reasons. --json lists all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the only model of the fleet)")
    parser.add_argument(
        "--worker",
        dest="only_workers",
        metavar="ID",
        action="append",
        help="id of a worker; may be repeated (default: all workers, or a sample of 64)",
    )
    parser.add_argument(
        "--plane", choices=PLANES, default="both", help="positions to show: prompt, generated or both (default: both)"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--last-s",
        metavar="TIME",
        type=duration,
        default=60.0,
        help="show the counts of the last S seconds, up to 120 (default: 60)",
    )
    when.add_argument("--versions", action="store_true", help="show all counts of each of the last 8 weight versions")
    parser.add_argument("--png", metavar="FILE", type=Path, help="also write the map as a PNG picture (default: none)")
    parser.add_argument(
        "--timeout-s", metavar="TIME", type=duration, default=5.0, help="seconds to wait for answers (default: 5)"
    )


async def run(args: argparse.Namespace) -> int:
    """Ask the workers and print their counts."""
    from .... import bus
    from ..console import note, print_json
    from ..watch.experts import answers_as_json

    if args.png is not None:
        _check_drawable()
    elif args.json:
        refuse_options(args, ["plane"], "with --json, which has both")
    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        answers = await rb.fleet.experts(
            args.model,
            workers=args.only_workers,
            last_s=None if args.versions else args.last_s,
            timeout_s=args.timeout_s,
        )
    if args.png is not None and answers.window is not None:
        _draw(args, answers, answers.window)
    if args.json:
        print_json(answers_as_json(answers))
    elif answers.window is not None:
        _show(args, answers, answers.window)
    left_out = [f"{worker}: {why}" for worker, why in sorted(answers.left_out.items())]
    if len(left_out) > MAX_NAMED:
        left_out[MAX_NAMED:] = [f"and {len(left_out) - MAX_NAMED} more"]
    if answers.window is None:
        raise CommandFailed(f"no worker of {answers.model} has counted experts: {'; '.join(left_out)}")
    if left_out:
        note(f"rollbus: not counted: {'; '.join(left_out)}")
        return ExitCode.PARTIAL
    return ExitCode.OK


def _check_drawable() -> None:
    try:
        import matplotlib  # noqa: F401 - checks that it is installed
    except ImportError as exc:
        raise CommandFailed(f"--png requires {exc.name}, which is not installed: {pip_install('rl')}") from exc


def _draw(args: argparse.Namespace, answers: "ExpertAnswers", window: "ExpertWindow") -> None:
    from ..console import note
    from ..watch.experts import draw

    draw(args.png, window, _plane(window, args.plane), _title(args, answers, window))
    note(f"rollbus: the map is in {args.png}")


def _show(args: argparse.Namespace, answers: "ExpertAnswers", window: "ExpertWindow") -> None:
    from ..console import write
    from ..tables import print_table, print_text
    from ..watch.experts import LEGEND, VERSION_COLUMNS, map_lines, share_text, version_rows

    plane = _plane(window, args.plane)
    print_text(_title(args, answers, window))
    for name, one in (("prompt", window.prompt), ("generated", window.generated)):
        write(f"{name}: {one.computed:,} tokens computed, {share_text(one)} of them seen")
    if not plane.seen:
        write("no routed experts were seen in that time")
        return
    if args.versions:
        print_table(VERSION_COLUMNS, version_rows(window.versions, window.shape.top_k))
    for line in (*map_lines(plane.counts, window.shape.top_k, shutil.get_terminal_size().columns), LEGEND):
        write(line)


def _plane(window: "ExpertWindow", name: str) -> "PlaneLoad":
    if name == "both":
        return window.prompt + window.generated
    return window.prompt if name == "prompt" else window.generated


def _title(args: argparse.Namespace, answers: "ExpertAnswers", window: "ExpertWindow") -> str:
    what = "all tokens" if args.plane == "both" else f"{args.plane} tokens"
    when = "of the last versions" if args.versions else f"of {window.seconds:.0f} s"
    workers = f"{len(window.workers)} of {answers.num_workers} workers"
    return f"{answers.model}: {what} {when}, {workers}; {window.shape}"
