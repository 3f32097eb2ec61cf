"""Stages sources of weights and adapters on the worker's machine, one at a time, while the worker serves.

Sources of recorded commands come first, in the order of recording, then sources of checks. The staging of a source that
is no longer needed is cancelled. A later staging of the source continues its partial download.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from ...schemas.errors import ControlCode, ControlError, EngineDead, storage_failure
from ...schemas.limits import MAX_ERROR_CHARS, Recent
from ...schemas.presence import Capabilities
from ...schemas.weights import Staging, UpdateTiming, WeightSource
from ..sources.sources import WeightSources

logger = logging.getLogger(__name__)

WAITING: Final = "waiting"
"""Stage of a source that waits until another source is staged."""
MAX_COSTS: Final = 8
"""Maximum stored costs: of the update in progress, and of recent updates that a fleet returns to."""


class UnknownFailure(ControlError):
    """An undocumented error of an engine or a source: the effect of the command is unknown."""


@contextmanager
def command_boundary(command: str) -> Iterator[None]:
    """Run the block, which executes `command`.

    Raises:
        ControlError: the command failed. The class is `UnknownFailure` if the error was not a ControlError.
        TimeoutError: the command exceeded its time limit.
        EngineDead: the engine is dead.
    """
    try:
        yield
    except (ControlError, TimeoutError, EngineDead):
        raise
    except Exception as exc:
        # Boundary: the worker publishes a failed ack and continues.
        logger.exception("command.failed command=%s", command)
        raise UnknownFailure(ControlCode.ENGINE_ERROR, f"{type(exc).__name__}: {exc}") from exc


class Deadline:
    """The deadline of a command after its `timeout_s`. The remaining time limits every step of the command.

    Args:
        timeout_s: seconds until the deadline.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Remaining seconds, at least 0."""
        return max(self._at - time.monotonic(), 0.0)

    @contextlib.asynccontextmanager
    async def bound(self, what: str) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            ControlError: `timeout`. The message names `what`, the step of the command.
        """
        try:
            async with asyncio.timeout(self.left_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            problem = f"{what} was not done within the command's {self._timeout_s:g} s"
            raise ControlError(ControlCode.TIMEOUT, problem) from None


def check_supported(source: WeightSource, capabilities: Capabilities, *, is_adapter: bool = False) -> None:
    """Check that the engine can replace its weights by those of `source`, or load the LoRA adapter of `source`.

    Raises:
        ControlError: `unsupported`.
    """
    problem = None
    if is_adapter and not capabilities.max_loras:
        problem = "this engine loads no LoRA adapters; its arguments may enable adapters (for vLLM: 'enable_lora')"
    elif not is_adapter and not capabilities.weight_updates:
        problem = "this engine cannot replace its weights"
    elif source.objects is not None and not capabilities.weight_deltas:
        problem = (
            f"{source} is refused: processes of this engine may run on several machines, but fetched files are only on "
            "the worker's machine; allowed: the path of a folder that all these machines share"
        )
    if problem is not None:
        raise ControlError(ControlCode.UNSUPPORTED, problem)


class StageKey(NamedTuple):
    """Identifies one staging."""

    source: WeightSource
    is_adapter: bool = False


class StagedContent(NamedTuple):
    """What a worker found at a source."""

    folder: Path
    """The real path of the folder on this machine."""
    digest: str | None
    """Digest of the weights or of the adapter."""


@dataclass(slots=True)
class StageCost:
    """The cost of staging a source, summed over all attempts of this process."""

    fetched_bytes: int = 0
    staged_s: float = 0.0
    done_at: float = 0.0
    """Monotonic time at which the last attempt succeeded."""


@dataclass(slots=True)
class StagerStats:
    """Counters since the start of the process."""

    weights_fetched_bytes: int = 0
    weights_staged: int = 0
    weights_stagings_failed: int = 0
    weights_stagings_cancelled: int = 0
    weights_staging_s: float = 0.0
    """Seconds of all stagings, successful or not."""
    weights_paused_s: float = 0.0
    """Seconds in which requests had no engine steps because weights were replaced."""


@dataclass(slots=True, eq=False)
class _StagingJob:
    key: StageKey
    is_desired: bool = False
    num_waiting: int = 0
    stage: str = WAITING
    error: ControlError | None = None
    content: StagedContent | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_needed(self) -> bool:
        return self.is_desired or self.num_waiting > 0


class Stager:
    """Stages sources in one task.

    Args:
        sources: fetches and checks sources.
        capabilities: returns the capabilities of the started engine. Unsupported sources are not fetched.
    """

    def __init__(self, sources: WeightSources, capabilities: Callable[[], Capabilities]) -> None:
        self._sources = sources
        self._capabilities = capabilities
        self.on_change: Callable[[], None] = lambda: None
        """Called after a source has reached a stage, was staged or has failed."""
        # At most one per register and per open check.
        self._jobs: dict[StageKey, _StagingJob] = {}
        self._current: tuple[_StagingJob, asyncio.Task[None]] | None = None
        self._is_due = asyncio.Event()
        self._costs = Recent[StageKey, StageCost](MAX_COSTS)
        self.stats = StagerStats()

    def set_desired(self, keys: Sequence[StageKey]) -> None:
        """Replace the set of sources that recorded commands need. Cancel stagings that are no longer needed."""
        for job in self._jobs.values():
            job.is_desired = job.key in keys
        for key in keys:
            self._get_job(key).is_desired = True
        self._remove_unneeded()

    async def stage(self, key: StageKey) -> StagedContent | None:
        """Wait until a source is staged, and return its content. If its staging is in progress, wait for that staging.

        Cancellation: the staging is cancelled too, unless another caller or a register needs it.

        Raises:
            ControlError: `unsupported`, or an error of `WeightSources.checkpoint` or `WeightSources.adapter`.
        """
        job = self._get_job(key)
        job.num_waiting += 1
        self._is_due.set()
        try:
            await job.done.wait()
        finally:
            job.num_waiting -= 1
            self._remove_unneeded()
        if job.error is not None:
            raise job.error
        return job.content

    def is_staged(self, key: StageKey) -> bool:
        """Return True if the staging of a needed source has succeeded or failed."""
        job = self._jobs.get(key)
        return job is not None and job.done.is_set()

    def error_of(self, key: StageKey) -> ControlError | None:
        """Return the error of a failed staging, or None if it succeeded or has not ended."""
        job = self._jobs.get(key)
        return None if job is None else job.error

    def cost_of(self, key: StageKey) -> StageCost:
        """Return the cost of staging a source."""
        return self._costs.get(key) or StageCost()

    def progress_of(self, key: StageKey) -> Staging | None:
        """Return the progress of a needed source, or None if it is not needed or is staged."""
        job = self._jobs.get(key)
        return None if job is None or job.done.is_set() else self._describe_progress(job)

    @property
    def progress(self) -> Staging | None:
        """Progress of the current staging, or None."""
        return None if self._current is None else self._describe_progress(self._current[0])

    def _describe_progress(self, job: _StagingJob) -> Staging:
        staging, source = self._sources.staging, str(job.key.source)[:MAX_ERROR_CHARS]
        is_current = self._current is not None and self._current[0] is job
        if is_current and staging is not None and (staging.source, staging.stage) == (source, job.stage):
            return staging
        return Staging(source=source, stage=job.stage)

    async def run(self) -> None:
        """Stage until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while (job := self._next()) is not None:
                async with asyncio.TaskGroup() as group:
                    self._current = job, group.create_task(self._run(job))
                self._current = None

    def _get_job(self, key: StageKey) -> _StagingJob:
        return self._jobs.setdefault(key, _StagingJob(key))

    def _next(self) -> _StagingJob | None:
        waiting = [job for job in self._jobs.values() if not job.done.is_set()]
        desired = [job for job in waiting if job.is_desired]
        return next(iter(desired or waiting), None)

    def _remove_unneeded(self) -> None:
        self._jobs = {key: job for key, job in self._jobs.items() if job.is_needed}
        if self._current is not None:
            job, task = self._current
            following = self._next()
            # A preempted check continues later with its partial download.
            is_preempted = following is not None and following.is_desired and not job.is_desired
            # Cancel once: a second cancel would interrupt the cleanup of the first.
            if (is_preempted or not job.is_needed) and not task.cancelling():
                task.cancel()
        self._is_due.set()

    async def _run(self, job: _StagingJob) -> None:
        cost = self._costs[job.key] = self.cost_of(job.key)
        began, last = time.monotonic(), self._sources.last_staged
        try:
            with command_boundary(f"stage {job.key.source}"):
                await self._bring(job)
        except (ControlError, TimeoutError) as exc:
            self.stats.weights_stagings_failed += 1
            job.error = exc if isinstance(exc, ControlError) else storage_failure(f"{exc!r}")
        except asyncio.CancelledError:
            self.stats.weights_stagings_cancelled += 1
            job.stage = WAITING
            raise
        else:
            self.stats.weights_staged += 1
            cost.done_at = time.monotonic()
            staged = self._sources.last_staged
            if staged is not None and staged is not last:
                cost.fetched_bytes += staged.fetched_bytes
                self.stats.weights_fetched_bytes += staged.fetched_bytes
        finally:
            spent_s = time.monotonic() - began
            cost.staged_s += spent_s
            self.stats.weights_staging_s += spent_s
            logger.info("weights.staging_ended source=%s seconds=%.3f error=%s", job.key.source, spent_s, job.error)
        job.done.set()
        self.on_change()

    async def _bring(self, job: _StagingJob) -> None:
        def report(stage: str) -> None:
            job.stage = stage
            self.on_change()

        source, is_adapter = job.key
        capabilities = self._capabilities()
        check_supported(source, capabilities, is_adapter=is_adapter)
        if is_adapter:
            folder = await self._sources.adapter(source, report, max_rank=capabilities.max_lora_rank)
        else:
            folder = await self._sources.checkpoint(source, report)
        job.content = StagedContent(folder, self._sources.digest_of(folder))
        if source.path is not None:
            # The command is recorded with the real path.
            self._costs[StageKey(WeightSource(path=str(folder)), is_adapter)] = self._costs[job.key]


@dataclass(slots=True)
class UpdateClock:
    """The times of one update."""

    stopped_at: float | None = None
    """Monotonic time at which the requests were stopped, or None if no weights were replaced."""
    loaded_s: float = 0.0
    canary_s: float = 0.0

    def timing(self, seen_at: float, cost: StageCost, now: float) -> UpdateTiming | None:
        """Return the timing of an update whose engine resumes at `now`, or None if no weights were replaced.

        Args:
            seen_at: monotonic time at which the worker read the command.
            cost: cost of staging the source of the command.
        """
        if self.stopped_at is None:
            return None
        return UpdateTiming(
            fetched_bytes=cost.fetched_bytes,
            staged_s=round(cost.staged_s, 3),
            waited_s=round(max(self.stopped_at - max(seen_at, cost.done_at), 0.0), 3),
            paused_s=round(max(now - self.stopped_at, 0.0), 3),
            loaded_s=round(self.loaded_s, 3),
            canary_s=round(self.canary_s, 3),
        )
