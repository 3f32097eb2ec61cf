"""Generate a result for every prompt of a file and write the results to another file.

Each line of the input is a JSON object: "prompt" (text) or "prompt_token_ids", and any field of SamplingParams
("max_tokens", "temperature", "seed", ...) and GenerateRequest ("request_id", "routed_experts_prompt_start", ...). The
options below set the fields that a line does not set.

The output has one JSON object for each prompt, in the order in which the prompts end. "index" is the line number of the
prompt, counted from 0. The command checks the whole input before it sends the first request. The object of a prompt
that fails has an "error", and the command exits with 1. Run the same command again to continue after an interruption,
or to retry failed prompts. Without a model, the model that answered the first prompt answers all. A line has its
"model" and, if it names one, the adapter as "lora".
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....schemas.limits import DEFAULT_MAX_IN_FLIGHT
from ..arguments import add_tokenizer, duration, non_negative_int, positive_int
from ..exits import CommandFailed, ExitCode

__all__ = ["EXAMPLES", "HELP", "add_arguments", "describe", "run"]

HELP = "generate results for the prompts of a JSONL file"
EXAMPLES = (
    "echo '{\"prompt_token_ids\": [1, 2, 3]}' > prompts.jsonl",
    "rollbus generate --input prompts.jsonl --output results.jsonl --max-tokens 32",
    "rollbus generate --input prompts.jsonl --output four.jsonl -n 4 --temperature 0.8 --routed-experts npz",
)

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--input", metavar="FILE", type=Path, required=True, help="file of prompts as JSONL")
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="file of results as JSONL")
    parser.add_argument(
        "--routed-experts",
        choices=("inline", "npz", "none"),
        default="inline",
        help="routed experts: base64 in each line, arrays in an .npz beside the output, or none (default: %(default)s)",
    )
    add_tokenizer(parser)
    parser.add_argument(
        "--max-in-flight",
        metavar="N",
        type=positive_int,
        default=DEFAULT_MAX_IN_FLIGHT,
        help="maximum number of requests in flight (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="name of the model (default: the only model of the fleet)")
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, help="maximum tokens per sample (default: 16)")
    parser.add_argument("--temperature", metavar="T", type=float, help="temperature, 0 (greedy) to 2 (default: 1)")
    parser.add_argument("--top-p", metavar="P", type=float, help="nucleus sampling, above 0 up to 1 (default: 1)")
    parser.add_argument(
        "--top-k", metavar="K", type=int, help="number of most likely tokens to sample from; 0: all (default: 0)"
    )
    parser.add_argument("--seed", metavar="N", type=non_negative_int, help="seed of every prompt (default: none)")
    parser.add_argument("-n", metavar="N", type=positive_int, help="samples per prompt (default: 1)")
    parser.add_argument(
        "--timeout-s", metavar="TIME", type=duration, help="timeout of each request in seconds (default: 3600)"
    )


def run(args: argparse.Namespace) -> int:
    """Check the files, generate, and print a report."""
    from ..app import run_async
    from ..console import print_json, write
    from ..generate_bar import GenerateBar
    from ..job import GenerateRun
    from ..prompts import Defaults, check_input
    from ..results import open_results

    rows_path = _check_paths(args)
    defaults = Defaults(*_default_fields(args))
    bar = GenerateBar(is_shown=not args.json and args.log_format == "text")
    with bar, open_results(args.output, rows_path) as results:
        bar.show("checking the prompts")
        job = GenerateRun(
            input=args.input,
            defaults=defaults,
            summary=check_input(args.input, defaults, results.finished),
            results=results,
            max_in_flight=args.max_in_flight,
            tokenizer_dir=args.tokenizer,
            bar=bar,
        )
        if len(results.finished) < job.summary.num_prompts:
            try:
                run_async(job.run(args.nats, args.fleet))
            except KeyboardInterrupt as exc:
                raise KeyboardInterrupt(job.count_text()) from exc
    report = {
        "prompts": job.summary.num_prompts,
        "resumed": len(results.finished),
        **asdict(job.counts),
        "output": str(args.output),
        "npz": None if rows_path is None or not rows_path.exists() else str(rows_path),
    }
    if args.json:
        print_json(report)
    else:
        write(describe(report))
    return ExitCode.FAILED if job.counts.failed else ExitCode.OK


def _check_paths(args: argparse.Namespace) -> Path | None:
    """Check the paths. Return the path of the `.npz` file, or None without --routed-experts npz."""
    if not args.input.is_file():
        raise CommandFailed(f"--input {args.input} is not a file", ExitCode.USAGE)
    if not args.output.absolute().parent.is_dir():
        raise CommandFailed(f"--output {args.output}: its folder does not exist", ExitCode.USAGE)
    rows_path: Path | None = args.output.with_suffix(".npz") if args.routed_experts == "npz" else None
    if rows_path == args.output:
        raise CommandFailed("--output must not end with .npz: routed experts go to a file of that name", ExitCode.USAGE)
    for path in (args.output, rows_path):
        if path is not None and path.exists() and path.samefile(args.input):
            raise CommandFailed("--input and --output are the same file", ExitCode.USAGE)
    return rows_path


def _default_fields(args: argparse.Namespace) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of the request and of its sampling from the options."""
    fields = _given(args, ("model", "timeout_s"))
    if args.routed_experts == "none":
        fields["return_routed_experts"] = False
    return fields, _given(args, SAMPLING_OPTIONS)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def describe(report: Mapping[str, Any]) -> str:
    """Return the report as one line of text."""
    text = f"{report['done']:,} of {report['prompts']:,} prompts done"
    if report["resumed"]:
        text += f", {report['resumed']:,} were done in earlier runs"
    if report["failed"]:
        text += f", {report['failed']:,} failed (the first, {report['first_error']})"
    if report["retryable"]:
        text += f", run again to retry {report['retryable']:,} of them"
    if report["models"]:
        text += f"; model{'s' * (len(report['models']) > 1)} {', '.join(report['models'])}"
    if report["tokens"]:
        text += f"; {report['tokens']:,} tokens in {report['seconds']} s"
    if report["seconds_to"]:
        times = ", ".join(f"{percent} % after {seconds} s" for percent, seconds in report["seconds_to"].items())
        text += f"; requests complete: {times}"
    places = [str(report[name]) for name in ("output", "npz") if report[name] is not None]
    return f"{text}: {', '.join(places)}"
