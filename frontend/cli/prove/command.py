"""Runs `rollbus prove`: the fleet, the stages in their order, and the table, the JSON and the picture at the end."""

import argparse
import asyncio
import itertools
import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from .... import __version__
from ....bus import GenerateRequest
from ....schemas.errors import InvalidRequest
from ....schemas.options import check_start, check_writable, computes_on_cpu
from ...tokenization import load_tokenizer
from ..app import until_signalled
from ..console import note, waiting, write
from ..exits import INTERRUPTED, ExitCode, WrongUsage
from ..generate.inputs import open_input
from ..generate.rows import Defaults, PromptLine, read_prompts
from ..local.fleet import DRIVER_TIMEOUT_S, check_vllm, default_state_dir
from ..options import refuse_options, use_model
from ..tables import NONE, machine
from .agreement import Agreement
from .report import Report, StageReport, picture, table
from .routing import Routing
from .speed import Speed
from .stage import Budget, FleetInUse, Proof, Stage, not_run, refusal_of, run_phase, use_fleet
from .survival import Survival
from .updates import Updates
from .verdicts import Outcome, Verdict, worst

STAGES: Final[tuple[Callable[[], Stage], ...]] = (Agreement, Routing, Updates, Survival, Speed)
"""The stages, in the order of the table."""
MAX_PROMPTS: Final = 512
"""Prompts of a user's file that are read. Agreement needs some thousand tokens and not more."""
OF_OWN: Final = ("workers", "gpus_per_worker", "engine", "engine_args", "kv_transfer_config", "weight_version")
"""Options that describe the command's own fleet."""


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Check the options, then run the stages and print their table."""
    stages = choose_stages([make() for make in STAGES], args.stages)
    for option, path in (("FILE", args.file), ("--picture", args.picture)):
        if path is not None:
            check_writable(f"directory of {option}", path.absolute().parent)
    is_own = not args.is_nats_named
    if is_own:
        if args.model is None:
            raise WrongUsage("--model is required without --nats: the directory of the checkpoint, or its model id")
        if args.engine == "vllm":
            check_vllm()
        use_model(args)
        check_start(args)
    else:
        refuse_options(args, OF_OWN, "with --nats: the fleet in use has its own")
    state_dir = Path(args.state_dir or default_state_dir()).absolute()
    check_writable("--state-dir", state_dir)
    # Workers get this path, and a worker of a fleet in use runs in another directory.
    folder = None if args.model is None else Path(args.model).absolute()
    rows = read_rows(args.prompts)
    proof = Proof(
        args=args,
        model=args.served_model_name or ("" if folder is None else folder.resolve().name),
        folder=folder if folder is not None and folder.is_dir() else None,
        is_own=is_own,
        scratch=state_dir,
        # The minutes begin when the fleet serves.
        budget=Budget(0.0, ()),
    )
    if is_own:
        proof.prompts = make_requests(rows, proof.folder)
    return _prove(proof, stages, rows)


async def _prove(proof: Proof, stages: Sequence[Stage], rows: Sequence[PromptLine]) -> int:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    run, is_stopped = _Run(proof, stages), True
    with tempfile.TemporaryDirectory(prefix="prove-", dir=proof.scratch) as scratch:
        proof.scratch = Path(scratch)
        with until_signalled():
            await run.run_all(rows)
            is_stopped = False
    if proof.shared is None:
        return INTERRUPTED
    code = _end(make_report(proof, run.reports(), created), proof.args)
    return INTERRUPTED if is_stopped else code


def choose_stages(stages: Sequence[Stage], names: Sequence[str] | None) -> list[Stage]:
    """Return the stages of these names, in their order; all of them if there are no names.

    Raises:
        CommandFailed: a name is unknown.
    """
    known = [stage.name for stage in stages]
    for name in names or ():
        if name not in known:
            raise WrongUsage(f"--stages: no stage {name!r}; allowed: {', '.join(known)}")
    return [stage for stage in stages if not names or stage.name in names]


class _Run:
    """The phases of all stages: those with the shared fleet, then the others, after its end if it is our own."""

    def __init__(self, proof: Proof, stages: Sequence[Stage]) -> None:
        self._proof = proof
        self._stages = stages
        self._outcomes: dict[str, Outcome] = {}
        self._seconds = dict.fromkeys((stage.name for stage in stages), 0.0)
        self._ended: set[str] = set()
        """Names of the stages whose last phase ended."""

    async def run_all(self, rows: Sequence[PromptLine]) -> None:
        """Run all phases. `rows` are the user's prompts; those for an own fleet are requests already."""
        proof = self._proof
        async with AsyncExitStack() as fleet:
            with waiting("starting the fleet"):
                proof.shared = await fleet.enter_async_context(_shared_fleet(proof))
            proof.prompts = proof.prompts or make_requests(rows, proof.folder)
            for stage in self._stages:
                refusal = refusal_of(stage, proof)
                if refusal is not None:
                    self._outcomes[stage.name] = not_run(refusal)
                    self._ended.add(stage.name)
            able = [stage for stage in self._stages if stage.name not in self._outcomes]
            shares = [share for stage in able for share in (stage.measure_share, stage.conclude_share)]
            proof.budget = Budget(proof.args.minutes * 60, shares)
            await self._run_phases(concluding=False)
            if not proof.is_own:
                await self._run_phases(concluding=True)
        if proof.is_own:
            await self._run_phases(concluding=True)

    async def _run_phases(self, *, concluding: bool) -> None:
        for stage in self._stages:
            share = stage.conclude_share if concluding else stage.measure_share
            before = self._outcomes.get(stage.name)
            if share and (before is None or before.verdict is not Verdict.NOT_RUN):
                started = time.monotonic()
                try:
                    with waiting(f"{stage.name}: {stage.bar}"):
                        outcome = await run_phase(stage, self._proof, share, concluding=concluding)
                finally:
                    self._seconds[stage.name] += time.monotonic() - started
                if outcome is not None:
                    self._outcomes[stage.name] = outcome if before is None else before.joined(outcome)
                    note(f"{stage.name}: {outcome.verdict}")
            if concluding or not stage.conclude_share:
                self._ended.add(stage.name)

    def reports(self) -> list[StageReport]:
        """Return the reports of all stages, also of those that did not end."""
        reports = []
        for stage in self._stages:
            outcome = self._outcomes.get(stage.name)
            if stage.name not in self._ended:
                stopped = not_run("the command was stopped before its end")
                outcome = stopped if outcome is None else outcome.joined(stopped)
            outcome = outcome or not_run("it made no result")
            reports.append(
                StageReport(
                    stage=stage.name,
                    bar=stage.bar,
                    verdict=outcome.verdict,
                    headline=outcome.headline or NONE,
                    seconds=round(self._seconds[stage.name], 1),
                    findings=outcome.findings,
                    details=outcome.details,
                )
            )
        return reports


@asynccontextmanager
async def _shared_fleet(proof: Proof) -> AsyncIterator[FleetInUse]:
    """Yield the fleet that the stages share, and set the model of the proof if the fleet knows it."""
    args = proof.args
    if proof.is_own:
        async with proof.own_fleet(num_workers=args.workers) as fleet:
            yield fleet
        return
    names = {name for name in (args.served_model_name or args.model, proof.model) if name}
    async with use_fleet(args.nats, args.fleet, names) as fleet:
        first = fleet.workers[0]
        proof.model = first.model
        if proof.folder is None and first.model_path is not None:
            path = Path(first.model_path)
            proof.folder = path if await asyncio.to_thread(path.is_dir) else None
        yield fleet


def read_rows(path: str | None) -> list[PromptLine]:
    """Return the rows of --prompts, as `rollbus generate` reads them.

    Raises:
        CommandFailed: the file cannot be read, it has no row, or a row is wrong.
    """
    if path is None:
        return []
    rows = list(itertools.islice(read_prompts(open_input(path), Defaults()), MAX_PROMPTS))
    if not rows:
        raise WrongUsage(f"--prompts {path} has no rows; expected one for each prompt")
    return rows


def make_requests(rows: Sequence[PromptLine], folder: Path | None) -> list[GenerateRequest]:
    """Return the requests of rows.

    Raises:
        CommandFailed: a row is wrong, names an adapter, or has text for which there is no tokenizer.
    """
    has_text = any(row.prompt is not None for row in rows)
    tokenizer = load_tokenizer(folder) if has_text and folder is not None else None
    requests = []
    for row in rows:
        try:
            request = row.request(tokenizer, uuid.uuid4().hex)
        except InvalidRequest as exc:
            raise WrongUsage(f"--prompts, row {row.index + 1}: {exc.message}") from exc
        if request.lora is not None:
            raise WrongUsage(f"--prompts, row {row.index + 1} names the adapter {request.lora}; no reference has it")
        requests.append(request)
    return requests


def make_report(proof: Proof, stages: Sequence[StageReport], created: str) -> Report:
    """Return the report of a run."""
    fleet, args = proof.fleet, proof.args
    engine = fleet.engine
    return Report(
        verdict=worst(stage.verdict for stage in stages),
        created=created,
        rollbus=__version__,
        commit=_commit(),
        device=_device(),
        machine=machine(),
        engine=engine.engine,
        engine_version=engine.engine_version,
        signature=engine.signature,
        model=proof.model,
        architecture=next(iter(proof.config.get("architectures") or ()), None),
        dtype=engine.dtype,
        logprobs_mode=engine.logprobs_mode,
        reference=proof.reference,
        workers=len(fleet.workers),
        is_own=proof.is_own,
        seed=args.seed,
        minutes=args.minutes,
        options={
            "engine_args": json.loads(args.engine_args or "{}"),
            "kv_transfer_config": args.kv_transfer_config,
            "reference": args.reference,
            "dtype": args.dtype,
        },
        stages=tuple(stages),
    )


def _commit() -> str | None:
    """Return the commit of the checkout from which rollbus runs; None if it does not run from one."""
    command = ["git", "-C", str(files(__package__)), "log", "-1", "--format=%h", "--", "."]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DRIVER_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        # Without git, the commit is not worth the result.
        return None
    return asked.stdout.strip() or None


def _device() -> str:
    """Return the accelerators of this machine with their driver, or its CPU."""
    if not computes_on_cpu():
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=DRIVER_TIMEOUT_S).stdout
            return "; ".join(line.strip() for line in listed.splitlines() if line.strip()) or "no GPU"
        except (OSError, subprocess.SubprocessError) as exc:
            note(f"nvidia-smi tells nothing: {exc}")
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "CPU"
    return next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "CPU")


def _end(report: Report, args: argparse.Namespace) -> int:
    """Print the table, write the files, and return the exit code."""
    text = msgspec.json.encode(report)
    # The table comes first: an error of a file then costs only the file.
    if args.json and args.file is None:
        note(table(report))
        write(text.decode())
    else:
        write(table(report))
    if args.file is not None:
        args.file.write_bytes(msgspec.json.format(text) + b"\n")
    if args.picture is not None:
        args.picture.write_text(picture(report))
    match report.verdict:
        case Verdict.WRONG:
            return ExitCode.FAILED
        case Verdict.NOT_RUN:
            note("rollbus prove: no stage ran, so nothing is proven")
            return ExitCode.USAGE
        case _:
            return ExitCode.OK
