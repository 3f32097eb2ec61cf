"""The tour: answer real questions with a real vLLM engine through a temporary NATS server.

The tour needs no GPU, no model and no server. It creates a tiny mixture-of-experts model. The model is not trained, so
its text is noise. All else is the same as with a trained model.
"""

import argparse
from collections.abc import Coroutine
from pathlib import Path

from ....schemas.options import check_writable, positive_int
from ..exits import CommandFailed, ExitCode
from ..options import EXAMPLES_DIR, refuse_options

HELP = "tour: answer real questions with a real engine"
EXAMPLES = (
    "rollbus demo",
    "rollbus demo --max-tokens 16",
)

QUESTIONS = EXAMPLES_DIR / "questions.jsonl"


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
        "--state-dir", metavar="DIR", type=Path, help="folder of the tiny MoE (default: ~/.cache/rollbus)"
    )


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Run the tour."""
    from ..generate.inputs import open_input
    from ..generate.rows import Defaults, read_prompts
    from ..local.fleet import check_vllm, default_state_dir
    from ..tour import Tour

    refuse_options(args, ["nats"], "here: this command starts its own server")
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
