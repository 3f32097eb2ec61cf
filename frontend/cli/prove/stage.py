"""The interface between `rollbus prove` and its stages: what a stage is, and what it gets."""

import argparse
import asyncio
import errno
import json
import time
from abc import ABC
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from .... import bus
from ....bus import GenerateRequest
from ....bus.nats.server import Server
from ....schemas.errors import RollbusError
from ....schemas.presence import Capabilities, WorkerPresence
from ..exits import WrongUsage
from ..local.display import FleetObserver
from ..local.fleet import LocalFleet, divide_gpus, run_fleet, worker_names
from ..local.processes import RestartRule
from ..options import worker_flags
from .verdicts import Finding, Outcome, Verdict

ENGINE_ARGS: Final[dict[str, Any]] = {"logprobs_mode": "raw_logprobs"}
"""Engine arguments of own fleets unless the user sets others. Processed log probabilities depend on the sampling."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file whose disk or quota is full. They are no fault of the fleet."""
PLAIN_PARTS: Final = 5
"""Parts of the signature of an engine that is not quantized."""


class StageRefused(RollbusError):
    """A stage cannot run here. The message has the reason."""


class Stage(ABC):
    """One stage. The docstring of the package describes it."""

    name: ClassVar[str]
    bar: ClassVar[str]
    """What must hold for `ok`, as one line."""
    changes_fleet: ClassVar[bool] = False
    """True: it stops workers or changes weights. On a fleet in use it runs only with --disruptive."""
    measure_share: ClassVar[float] = 1.0
    """Part of the minutes for `measure`, relative to the other phases. 0: no such phase."""
    conclude_share: ClassVar[float] = 0.0
    """Part of the minutes for `conclude`. 0: no such phase."""

    def refusal(self, proof: "Proof") -> str | None:
        """Return the reason why the stage cannot run on this fleet; None: it can."""
        return None

    async def measure(self, proof: "Proof") -> Outcome | None:
        """Measure with the fleet that all stages share."""
        return None

    async def conclude(self, proof: "Proof") -> Outcome | None:
        """Measure and judge after that fleet has stopped, unless it is a fleet in use."""
        return None


class Budget:
    """The time of a run, divided among the phases of its stages. What a phase does not use is left to the others."""

    def __init__(self, total_s: float, shares: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + total_s
        self._shares = sum(shares)
        self._phase_end = self._end

    def begin(self, share: float) -> float:
        """Begin a phase with this share, and return its seconds."""
        left = max(self._end - self._clock(), 0.0)
        seconds = left * share / max(self._shares, share)
        self._shares -= share
        self._phase_end = self._clock() + seconds
        return seconds

    def left_s(self) -> float:
        """Return the seconds that the phase has left."""
        return max(self._phase_end - self._clock(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetInUse:
    """A running fleet, and a client of it."""

    rb: bus.Client
    server: Server | str
    fleet: str
    workers: tuple[WorkerPresence, ...]
    """The workers of the model, which all have capabilities."""

    @property
    def engine(self) -> Capabilities:
        """Capabilities of the first worker."""
        engine = self.workers[0].capabilities
        if engine is None:
            raise StageRefused(f"worker {self.workers[0].worker} has not announced its capabilities")
        return engine


@dataclass(slots=True, kw_only=True)
class Proof:
    """One run of the command: the model, the fleet and what stages share."""

    args: argparse.Namespace
    """The options of `rollbus prove`."""
    model: str
    """Served name of the model."""
    folder: Path | None
    """Directory of the checkpoint on this machine. None: there is none, so nothing can be compared with it."""
    is_own: bool
    """True: the fleet is the command's own, and stages may start others."""
    scratch: Path
    """Empty directory for this run, below a weight root of own workers."""
    budget: Budget
    prompts: Sequence[GenerateRequest] = ()
    """The user's prompts."""
    shared: FleetInUse | None = None
    """The fleet that the stages share. In `conclude`, the client of an own fleet is closed; its workers are known."""
    reference: str | None = None
    """Device and dtype of the forward passes of transformers, if there were some."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What one stage leaves for another."""

    @property
    def fleet(self) -> FleetInUse:
        """The fleet that the stages share."""
        if self.shared is None:
            raise StageRefused("no fleet runs")
        return self.shared

    @property
    def rb(self) -> bus.Client:
        """Client of that fleet."""
        return self.fleet.rb

    @property
    def dtype(self) -> str:
        """Dtype of the engines, for limits: `quantized` if they are."""
        # Device, parallelism, dtype, release and KV dtype; a quantization follows them.
        is_quantized = len(self.fleet.engine.signature.split()) > PLAIN_PARTS
        return "quantized" if is_quantized else self.fleet.engine.dtype

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the checkpoint. Empty if it is not on this machine."""
        path = None if self.folder is None else self.folder / "config.json"
        return json.loads(path.read_text()) if path is not None and path.is_file() else {}

    def seconds_left(self) -> float:
        """Return the seconds that the present phase has left."""
        return self.budget.left_s()

    @asynccontextmanager
    async def own_fleet(
        self, *, num_workers: int = 1, num_prefill: int = 0, flags: Sequence[str] = ()
    ) -> AsyncIterator[FleetInUse]:
        """Run a fleet of the model on this machine while the body runs, with the user's engine arguments.

        Args:
            num_workers: workers, including `num_prefill` prefill workers.
            flags: more flags of `python -m rollbus.workers`.

        Raises:
            StageRefused: the fleet is not the command's own, or there are too few GPUs.
            CommandFailed: a worker did not start.
        """
        if not self.is_own:
            raise StageRefused("it starts a fleet of its own, so it does not run with --nats")
        names = worker_names(num_workers)
        defaults = ENGINE_ARGS if self.args.engine == "vllm" else {}
        given = {**defaults, **json.loads(self.args.engine_args or "{}")}
        changed = {"engine_args": json.dumps(given), "served_model_name": self.model}
        chosen = argparse.Namespace(**{**vars(self.args), **changed})
        try:
            worker_env = divide_gpus(chosen, names)
        except RollbusError as exc:
            raise StageRefused(str(exc)) from exc
        chosen.weight_root = [*chosen.weight_root, str(self.scratch)]
        local = LocalFleet(
            fleet=self.args.fleet,
            model=self.folder,
            num_workers=num_workers,
            num_prefill=num_prefill,
            worker_flags=[*worker_flags(chosen), *flags],
            start_timeout_s=self.args.start_timeout,
            served_model=self.model,
            worker_env=worker_env,
            restarts=RestartRule(first_delay_s=0.0),
        )
        async with (
            run_fleet(local, FleetObserver(shows_logs=self.args.verbose)) as server,
            use_fleet(server, local.fleet, [self.model]) as fleet,
        ):
            yield fleet


@asynccontextmanager
async def use_fleet(server: Server | str, fleet: str, names: Collection[str] = ()) -> AsyncIterator[FleetInUse]:
    """Connect to a fleet and yield it with its workers of one model.

    Args:
        names: served names, of which the model has one. Empty: the only model of the fleet.

    Raises:
        CommandFailed: no worker serves it, or workers serve several models.
    """
    async with bus.connect(server, fleet=fleet) as rb:
        state = await rb.fleet.state()
        workers = [worker for worker in state.workers if worker.capabilities is not None and worker.state.is_present]
        models = {worker.model for worker in workers}
        chosen = models & set(names) if names else models
        if len(chosen) != 1:
            found = ", ".join(sorted(models)) or "no worker that serves"
            raise WrongUsage(f"--model: fleet {fleet} has {found}; allowed: one of its models")
        yield FleetInUse(
            rb=rb, server=server, fleet=fleet, workers=tuple(worker for worker in workers if worker.model in chosen)
        )


async def run_phase(stage: Stage, proof: Proof, share: float, *, concluding: bool) -> Outcome | None:
    """Run one phase of a stage within its part of the minutes, and turn its failures into verdicts."""
    seconds = proof.budget.begin(share)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await (stage.conclude(proof) if concluding else stage.measure(proof))
    except (RollbusError, OSError, BaseExceptionGroup) as exc:
        # Another wait of the stage or of the fleet may also raise a TimeoutError.
        if isinstance(exc, TimeoutError) and limit.expired():
            return not_run(f"its part of the time, {seconds:.0f} s, was too short; set --minutes higher")
        return failure(exc)


def failure(error: BaseException) -> Outcome:
    """Return the outcome of an error. Task groups of a stage and of its fleet wrap errors.

    Raises:
        BaseExceptionGroup: it has other errors than those of a fleet.
    """
    if isinstance(error, BaseExceptionGroup) and error.split((RollbusError, OSError))[1] is not None:
        raise error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StageRefused):
        return not_run(str(error))
    if isinstance(error, OSError) and error.errno in FULL:
        return not_run(f"a disk is full: {error}")
    text = f"the fleet failed: {str(error) or type(error).__name__}"
    return Outcome(findings=(Finding(verdict=Verdict.WRONG, what=text),), headline="failed")


def not_run(reason: str) -> Outcome:
    """Return the outcome of a stage that did not run."""
    return Outcome(findings=(Finding(verdict=Verdict.NOT_RUN, what=reason),))


def refusal_of(stage: Stage, proof: Proof) -> str | None:
    """Return the reason why a stage does not run; None: it runs."""
    if stage.changes_fleet and not proof.is_own and not proof.args.disruptive:
        return "it stops workers and changes weights; say --disruptive to run it on this fleet"
    return stage.refusal(proof)
