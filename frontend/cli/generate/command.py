"""`rollbus generate`: checks the files, runs the requests and prints a report."""

import argparse
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....schemas.errors import is_disk_full
from ....schemas.options import check_writable
from ..app import run_async
from ..console import note, print_result, size
from ..exits import CommandFailed, ExitCode, WrongUsage, cause_of
from ..tables import printable
from .inputs import open_input
from .results import open_results, parquet_results
from .rows import Defaults, check_input
from .run import FirstRun, GenerateBar, GenerateRun, read_first_run, write_first_run

SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
READ_OPTIONS = ("input", "subset", "split", "prompt_field", "row_options", "messages")
"""Options that change what is read."""
MIN_RESULT_BYTES = 400
"""Bytes of the shortest result."""


def run(args: argparse.Namespace) -> int:
    """Check the files, generate, and print a report."""
    rows_path = _check_paths(args)
    fields, sampling = _default_fields(args)
    defaults = Defaults(fields, sampling, args.prompt_field, args.row_options, args.messages)
    options = _result_options(args)
    bar = GenerateBar(is_shown=not args.json and args.log_format == "text")
    with ExitStack() as stack:
        runs: list[GenerateRun] = []
        stack.enter_context(_full_disk_as_failure(args.output, runs))
        stack.enter_context(bar)
        bar.show("opening the input")
        first = read_first_run(args.output)
        revision = first.revision if first and first.options.get("--input") == args.input else None
        source = open_input(args.input, subset=args.subset, split=args.split, revision=revision, streams=args.stream)
        source.check_not_empty()
        opened = parquet_results if args.output.suffix == ".parquet" else open_results
        results = stack.enter_context(opened(args.output, rows_path))
        bar.show("checking the prompts")
        first = first if results.finished else None
        changes = first.changes(options) if first else ""
        summary = check_input(source, defaults, results.finished, changes)
        if summary.repeated_ids:
            note(f"{summary.repeated_ids:,} rows repeat a request_id; the field index of a result is unique")
        _check_disk(args.output, (summary.num_prompts or 0) - len(results.finished))
        if first is None:
            write_first_run(args.output, FirstRun(options, source.revision))
        job = GenerateRun(
            input=source,
            defaults=defaults,
            summary=summary,
            results=results,
            max_in_flight=args.max_in_flight,
            record=args.record,
            tokenizer_dir=args.tokenizer,
            with_prompt=args.with_prompt,
            changes=changes,
            bar=bar,
        )
        runs.append(job)
        if summary.num_prompts is None or len(results.finished) < summary.num_prompts:
            try:
                run_async(job.run(args.nats, args.fleet))
            except KeyboardInterrupt as exc:
                raise KeyboardInterrupt(job.count_text()) from exc
    report = {
        "prompts": job.num_ended if summary.num_prompts is None else summary.num_prompts,
        "resumed": len(results.finished),
        **asdict(job.counts),
        "output": str(args.output),
        "npz": None if rows_path is None or not rows_path.exists() else str(rows_path),
    }
    print_result(args, report, describe(report))
    return ExitCode.FAILED if job.counts.failed else ExitCode.OK


def _check_paths(args: argparse.Namespace) -> Path | None:
    """Check the paths. Return the path of the `.npz` file, or None without --routed-experts npz."""
    folder = args.output.absolute().parent
    if not folder.is_dir():
        raise WrongUsage(f"--output {args.output}: {folder} is not a directory")
    if args.output.is_dir():
        raise WrongUsage(f"--output {args.output} is a directory; name a file in it")
    if not os.access(folder, os.W_OK):
        raise WrongUsage(f"--output {args.output}: {folder} is not writable")
    rows_path: Path | None = args.output.with_suffix(".npz") if args.routed_experts == "npz" else None
    if rows_path == args.output:
        raise WrongUsage("--output must not end with .npz: routed experts go to a file of that name")
    if args.record is not None:
        check_writable("--record", args.record)
    source = Path(args.input)
    for path in (args.output, rows_path):
        if path is not None and path.exists() and source.exists() and path.samefile(source):
            raise WrongUsage("--input and --output are the same file")
    return rows_path


def _check_disk(output: Path, num_prompts: int) -> None:
    """Check that the shortest possible results fit on the disk.

    Raises:
        CommandFailed: they do not.
    """
    free, needed = shutil.disk_usage(output.absolute().parent).free, num_prompts * MIN_RESULT_BYTES
    if free < needed:
        raise CommandFailed(
            f"--output {output}: {num_prompts:,} results need at least {needed / 1e9:.3g} GB, and the disk has "
            f"{free / 1e9:.3g} GB free"
        )


@contextmanager
def _full_disk_as_failure(output: Path, runs: Sequence[GenerateRun]) -> Iterator[None]:
    """Turn the error of a full disk into one that names the file and the bytes that the other results need.

    Raises:
        CommandFailed: the disk is full.
    """
    try:
        yield
    except (OSError, BaseExceptionGroup) as exc:
        cause = cause_of(exc) if isinstance(exc, BaseExceptionGroup) else exc
        if not runs or not isinstance(cause, OSError) or not is_disk_full(cause):
            raise
        run = runs[0]
        each, left = run.results.mean_bytes or MIN_RESULT_BYTES, run.num_left
        needed = f"{left:,} more results need about {size(left * each)}" if left else "the results do not fit"
        free = shutil.disk_usage(output.absolute().parent).free
        # `app` adds the advice for a full disk.
        raise CommandFailed(f"{output}: {cause.strerror}; {needed}, and the disk has {size(free)} free") from cause


def _result_options(args: argparse.Namespace) -> dict[str, object]:
    """Return the options that affect results, by their names on the command line."""
    names = (*READ_OPTIONS, "model", *SAMPLING_OPTIONS)
    options = {"-n" if name == "n" else f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    return {**options, "--routed-experts": "none" if args.routed_experts == "none" else None}


def _default_fields(args: argparse.Namespace) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of the request and of its sampling from the options."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    fields: dict[str, object] = {name: given[name] for name in ("model", "timeout_s") if name in given}
    if args.routed_experts == "none":
        fields["return_routed_experts"] = False
    return fields, {name: given[name] for name in SAMPLING_OPTIONS if name in given}


def describe(report: Mapping[str, Any]) -> str:
    """Return the report as one line of text."""
    text = f"{report['done']:,} of {report['prompts']:,} prompts done"
    if report["resumed"]:
        text += f", {report['resumed']:,} were done in earlier runs"
    if report["failed"]:
        text += f", {report['failed']:,} failed (the first, {printable(report['first_error'])})"
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
