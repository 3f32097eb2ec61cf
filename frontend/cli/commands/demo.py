"""The tour: answer real questions with a real vLLM engine through a temporary NATS server.

The tour needs no GPU, no model and no server. It creates a tiny mixture-of-experts model. The model is not trained, so
its text is noise. All else is the same as with a trained model.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path

from ....schemas.options import check_writable, pip_install, positive_int
from ..exits import CommandFailed, ExitCode
from ..options import EXAMPLES_DIR, refuse_options

HELP = "tour: answer real questions with a real engine"
EXAMPLES = (
    "rollbus demo",
    "rollbus demo --max-tokens 16",
    "rollbus demo --rl",
)

QUESTIONS = EXAMPLES_DIR / "questions.jsonl"
RL_LOOP = EXAMPLES_DIR / "rl_loop.py"
"""A separate program, run as a process."""
RL_LOOP_NEEDS = ("matplotlib", "torch", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help="prompts as JSONL, as for `generate` (default: examples/questions.jsonl)",
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=positive_int, default=64, help="maximum tokens per prompt (default: 64)"
    )
    parser.add_argument(
        "--rl",
        action="store_true",
        help="train three tiny policies with RL instead of the tour; takes a few minutes and writes rl-output/",
    )
    parser.add_argument(
        "--state-dir", metavar="DIR", type=Path, help="folder of the tiny MoE (default: ~/.cache/rollbus)"
    )


def run(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
    """Run the tour."""
    from ..generate.inputs import open_input
    from ..generate.rows import Defaults, read_prompts
    from ..local.fleet import check_vllm, default_state_dir
    from ..tour import Tour

    refuse_options(args, ["nats"], "here: this command starts its own server")
    if args.rl:
        refuse_options(args, ("input", "max_tokens", "state_dir", "json"), "with --rl")
        return _learn()
    path: Path = (args.input or QUESTIONS).resolve()
    if not path.is_file():
        raise CommandFailed(f"no file {path}; name a file of questions with --input FILE", ExitCode.USAGE)
    prompts = list(read_prompts(open_input(str(path)), Defaults(sampling={"max_tokens": args.max_tokens})))
    if not prompts:
        raise CommandFailed(f"{path} contains no prompts", ExitCode.USAGE)
    check_vllm()
    state_dir = args.state_dir or default_state_dir()
    check_writable("--state-dir", state_dir)
    tour = Tour(
        prompts=prompts,
        source=path,
        fleet=args.fleet,
        state_dir=state_dir,
        as_json=args.json,
        is_verbose=args.verbose,
    )
    return tour.run()


def _learn() -> int:
    """Run the RL loop and return its exit code."""
    from ..local.fleet import check_vllm
    from ..options import python_env

    check_vllm()
    missing = [name for name in RL_LOOP_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandFailed(f"{', '.join(missing)} not installed: {pip_install('rl')}")
    return subprocess.run([sys.executable, "-P", str(RL_LOOP)], env=python_env(), check=False).returncode
