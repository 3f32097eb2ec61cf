"""The tour: real questions through a real vLLM engine, over a NATS server that lives as long as the tour.

Needs no GPU, no model and no server: a tiny mixture-of-experts model is made on the spot. It has never been trained,
so what it writes is noise; everything around it is what a trained model would get.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from frontend.cli.arguments import positive_int
from frontend.cli.exits import CommandFailed, ExitCode

__all__ = ["HELP", "add_arguments", "run"]

HELP = "the tour: real questions through a real engine"

QUESTIONS = Path(__file__).resolve().parents[1] / "questions.jsonl"
"""In a checkout a link to examples/questions.jsonl, so that an installed package has them, too."""
RL_LOOP = Path("examples", "rl_loop.py")
"""Beside this package where it is installed, else in the checkout. It is a program of its own, and run as one."""
RL_LOOP_NEEDS = ("matplotlib", "torch", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help="prompts, JSONL as for `generate` (default: examples/questions.jsonl)",
    )
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, default=64, help="per prompt (default: 64)")
    parser.add_argument(
        "--rl",
        action="store_true",
        help="instead of the tour: three tiny policies learn by reinforcement, some minutes; writes to rl-output/",
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", type=Path, help="where the tiny MoE is kept (default: ~/.cache/rollbus)"
    )


def run(args: argparse.Namespace) -> int:
    """Give the tour."""
    from frontend.cli.app import run_async
    from frontend.cli.local_fleet import check_vllm, default_state_dir
    from frontend.cli.prompts import Defaults, read_prompts
    from frontend.cli.tour import Tour

    if args.rl:
        return _learn()
    path: Path = (args.input or QUESTIONS).resolve()
    if not path.is_file():
        raise CommandFailed(f"no questions at {path}; name some with --input FILE", ExitCode.USAGE)
    prompts = list(read_prompts(path, Defaults(sampling={"max_tokens": args.max_tokens})))
    if not prompts:
        raise CommandFailed(f"{path} holds no prompts", ExitCode.USAGE)
    check_vllm()
    tour = Tour(
        prompts=prompts,
        source=path,
        fleet=args.fleet,
        state_dir=args.state_dir or default_state_dir(),
        as_json=args.json,
        is_verbose=args.verbose,
    )
    return run_async(tour.run())


def _learn() -> int:
    """Run the loop that learns; returns its exit code."""
    from frontend.cli.local_fleet import check_vllm
    from frontend.cli.worker_options import python_env

    check_vllm()
    missing = [name for name in RL_LOOP_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandFailed(f"{', '.join(missing)} not installed: pip install 'rollbus[rl]'")
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parents[1]):
        if (folder / RL_LOOP).is_file():
            return subprocess.run(
                [sys.executable, "-P", str(folder / RL_LOOP)], env=python_env(), check=False
            ).returncode
    raise CommandFailed(f"{RL_LOOP} is not there: it comes with the wheel and with a checkout")
