"""The weights of a worker: replaced, and trusted only once a canary has shown that they are what they should be.

From the moment in which the engine may touch them until the canary has passed, nobody knows what they are:
`is_poisoned` holds, also where a load is cut short, and what the engine makes in that time is held back. The version
moves with the verdict, and never otherwise.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from schemas.control import (
    LOAD_TIMEOUT_S,
    Canary,
    CheckWeights,
    FinishWeightUpdate,
    PauseMode,
    UpdateWeights,
    WeightSource,
)
from schemas.errors import ControlCode, ControlError, EngineDead
from workers.config import WorkerConfig
from workers.control.canary import Canaries, Fingerprint, fingerprint_of
from workers.control.deadline import Deadline
from workers.control.flow import Flow
from workers.control.loras import Loras
from workers.engine_runner import EngineRunner
from workers.sources import Sources
from workers.versions import Versions

__all__ = ["UNTOUCHED", "Weights"]

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
UNTOUCHED = frozenset({ControlCode.ENGINE_ERROR, ControlCode.UNSUPPORTED})
"""What an engine says that has left its weights as they were."""


class Weights:
    """The weights of one worker; it never calls `Flow.go`.

    Args:
        config: says which checkpoint the engine is started with, and whether its reload is to be proven.
        loras: adapters, which engines may lose with the weights.
        versions: of which `weight_version` is kept here.
    """

    def __init__(
        self,
        config: WorkerConfig,
        runner: EngineRunner,
        flow: Flow,
        sources: Sources,
        loras: Loras,
        versions: Versions,
    ) -> None:
        self._runner = runner
        self._flow = flow
        self._sources = sources
        self._loras = loras
        self._versions = versions
        self._own = None if config.model_path is None else Path(config.model_path)
        self._is_to_be_proven = config.prove_reload
        self._canaries = Canaries(runner, flow)
        self._fingerprint: Fingerprint = ()
        self._are_from_start = True
        self.source: WeightSource | None = None
        """Of the last good update; None: there was none, or they came by a transfer."""
        self.canary: Canary | None = None
        """What the present weights give, once that was seen."""
        self.is_poisoned = False
        """They are half written, or not what they should be: the worker serves nothing."""
        self.problem: str | None = None
        """Why `is_poisoned`."""
        self.is_transferring = False
        """A transfer has begun to replace them, and has not ended: they are half written."""

    def __repr__(self) -> str:
        """One line with the versions."""
        poisoned = " poisoned" if self.is_poisoned else ""
        return f"<Weights version={self.version} target={self.target} source={self.source}{poisoned}>"

    @property
    def version(self) -> int:
        """Of the weights that the engine samples from, or of the last good ones while they are poisoned."""
        return self._versions.weight_version

    @property
    def target(self) -> int:
        """Of those that it should have."""
        return self._versions.target_version

    # What a worker does with commands

    async def prove(self) -> None:
        """Load the checkpoint of the start once more: an engine whose output that changes is no good for updates.

        Called while nothing is in flight and the engine's steps are read. Does nothing where it is not to be proven,
        there is no checkpoint, or the engine cannot replace its weights.

        Raises:
            EngineDead: its reload is broken; the message says how.
        """
        if not self._is_to_be_proven or not self._runner.engine.capabilities.weight_updates or self._own is None:
            return
        own = self._own
        fingerprint = await fingerprint_of(own)
        if not fingerprint:
            return
        deadline = Deadline(LOAD_TIMEOUT_S)
        try:
            self._accept(await self._canaries.make(deadline), fingerprint)
            load = self._runner.engine.load_weights
            await self.replace(lambda: load(own), deadline, _ignore, fingerprint=fingerprint)
        except ControlError as exc:
            raise EngineDead(f"the engine cannot reload its own checkpoint {own}: {exc.message}") from exc
        logger.info("weights.proven version=%s path=%s", self.version, own)

    async def check(self, command: CheckWeights) -> None:
        """Say whether an update with this source could be carried out; nothing is touched.

        Raises:
            ControlError: `unsupported`, `path_refused`, `bad_source`, `storage`, `timeout`.
        """
        await self._find(command.source, Deadline(command.timeout_s), _ignore)

    async def update(self, command: UpdateWeights, report: Report) -> Canary | None:
        """Replace the weights by a checkpoint's; what was sampled before bears the old version, all else the new.

        Where they are here already, nothing happens. Afterwards the flow is as `command.mode` has it, and what was made
        during the verification is held back until the worker goes on.

        Args:
            report: told what is being done.

        Returns:
            What the new weights give; None: they are those of the start, which nobody has looked at.
        Cancellation: before the load nothing has happened; later the weights are poisoned.

        Raises:
            ControlError: `invalid_command`, `unsupported`, `path_refused`, `bad_source`, `storage`, `timeout`,
                `cache_in_use`, `engine_error`, and `not_verified` of weights that are here already: they are as they
                were. With `is_poisoned`: `half_written`, `not_verified`, `timeout`; requests in flight were given up.
            EngineDead: the engine is gone.
        """
        self._canaries.check(command.expected_canary)
        if self.is_current(command):
            if self.canary is not None and command.expected_canary is not None:
                self._canaries.judge(self.canary, command.expected_canary, "the expected one")
            return self.canary
        deadline = Deadline(command.timeout_s)
        path = await self._find(command.source, deadline, report)
        fingerprint = await fingerprint_of(path)
        report("pausing")
        await self.stop(command.mode, deadline)
        clear_cache = command.mode != "keep" if command.clear_cache is None else command.clear_cache
        if clear_cache:
            # Now, while nothing was touched: until the flow goes on, nothing is cached anew.
            await self._flush(command.mode, deadline, report)
        load = self._runner.engine.load_weights
        with self._sources.using(path):
            canary = await self.replace(
                lambda: load(path), deadline, report, fingerprint=fingerprint, expected=command.expected_canary
            )
        self.stamp(command.version, command.source)
        return canary

    def is_current(self, command: UpdateWeights | FinishWeightUpdate) -> bool:
        """There is nothing to load: these weights are here, or the engine was started with this version."""
        source = command.source if isinstance(command, UpdateWeights) else None
        is_here = self._are_from_start or self.source == source
        return is_here and self.version == command.version and not self.is_poisoned and not self.is_transferring

    async def restore(self, report: Report, timeout_s: float) -> None:
        """Load the present weights once more, into an engine that has dropped them and has nothing in flight.

        Raises:
            ControlError: they cannot be had again, or are not what they were; they are poisoned.
            EngineDead: the engine is gone.
        """
        deadline = Deadline(timeout_s)
        self._poison("the engine has dropped them")
        path = self._own if self._are_from_start else None
        if self.source is not None:
            path = await self._find(self.source, deadline, report)
        if path is None:
            raise ControlError(ControlCode.HALF_WRITTEN, "the engine has dropped weights that cannot be had again")
        load, folder = self._runner.engine.load_weights, path
        fingerprint = await fingerprint_of(path)
        with self._sources.using(folder):
            await self.replace(lambda: load(folder), deadline, report, fingerprint=fingerprint, expected=self.canary)

    def distrust(self, reason: str) -> None:
        """They are not what they should be, nor is what they gave; the caller ends what is in flight."""
        logger.error("weights.poisoned version=%s reason=%s", self.version, reason)
        self._canaries.forget(self._fingerprint)
        self.is_transferring = False
        self._poison(reason)

    # What transfers need too

    async def stop(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop the flow as `mode` has it, with all that was sampled handed over under the version that still holds.

        Raises:
            ControlError: `timeout`.
            EngineDead: the engine is gone.
        """
        await self._flow.stop(mode, deadline.left_s)
        # Held since an earlier update under the same pause.
        self._flow.release_steps()
        self._flow.break_legs(lambda _lora: True, "the weights are replaced")

    async def replace(
        self,
        change: Callable[[], Awaitable[None]],
        deadline: Deadline,
        report: Report,
        *,
        fingerprint: Fingerprint = (),
        expected: Canary | None = None,
    ) -> Canary:
        """Have `change` replace the weights of the stopped engine, and see that they are what they should be.

        Args:
            fingerprint: of the checkpoint; empty: they come from none.
            expected: what they should give.

        Returns:
            What they give; they bear the old version still.
        Cancellation: as after a failure in the middle.

        Raises:
            ControlError: `engine_error` or `unsupported` by `change`: they are as they were. Any other: they are
                poisoned, and what was in flight was given up.
            EngineDead: the engine is gone.
        """
        before = self.is_poisoned, self.problem
        self._poison("their exchange was cut short")
        try:
            report("loading")
            async with deadline.bound("loading the weights"):
                await self._change(change, before)
            await self._loras.bring_back(report, deadline)
            report("verifying")
            async with deadline.bound("verifying the weights"):
                canary = await self._look(deadline)
            self._judge(canary, fingerprint, expected)
            self._accept(canary, fingerprint)
        except ControlError as exc:
            if self.is_poisoned:
                self.problem = exc.message
            raise
        finally:
            if self.is_poisoned:
                self.is_transferring = False
                logger.error("weights.poisoned version=%s reason=%s", self.version, self.problem)
                self._flow.discard_steps()
                self._flow.give_up(f"the weights of this worker are not to be trusted: {self.problem}")
        return canary

    def stamp(self, version: int, source: WeightSource | None) -> None:
        """What is sampled from now on, and what is held back, bears this version."""
        self._versions.weight_version = version
        self.source, self._are_from_start = source, False
        logger.info("weights.updated version=%s source=%s", version, source)

    async def _change(self, change: Callable[[], Awaitable[None]], before: tuple[bool, str | None]) -> None:
        try:
            await change()
        except ControlError as exc:
            if exc.code in UNTOUCHED:
                self.is_poisoned, self.problem = before
            raise

    async def _look(self, deadline: Deadline) -> Canary:
        """See what the weights give; what the engine makes for others meanwhile is held back."""
        was_frozen = self._runner.is_frozen
        self._flow.hold_steps()
        await self._flow.thaw()
        canary = await self._canaries.make(deadline)
        if was_frozen:
            await self._flow.freeze()
        return canary

    def _judge(self, canary: Canary, fingerprint: Fingerprint, expected: Canary | None) -> None:
        if expected is not None:
            self._canaries.judge(canary, expected, "the expected one")
        known = self._canaries.known(fingerprint)
        if known is not None:
            self._canaries.judge(canary, known, "what this checkpoint gave before")

    def _accept(self, canary: Canary, fingerprint: Fingerprint) -> None:
        self.canary, self._fingerprint = canary, fingerprint
        self.is_poisoned, self.problem, self.is_transferring = False, None, False
        if fingerprint:
            self._canaries.remember(fingerprint, canary)

    def _poison(self, reason: str) -> None:
        self.is_poisoned, self.problem = True, reason

    async def _find(self, source: WeightSource, deadline: Deadline, report: Report) -> Path:
        if not self._runner.engine.capabilities.weight_updates:
            raise ControlError(ControlCode.UNSUPPORTED, "this engine cannot replace its weights")
        async with deadline.bound("checking the checkpoint"):
            return await self._sources.checkpoint(source, report)

    async def _flush(self, mode: PauseMode, deadline: Deadline, report: Report) -> None:
        report("flushing")
        async with deadline.bound("flushing the cache"):
            if not await self._runner.engine.reset_cache(preempt=mode == "keep"):
                raise ControlError(ControlCode.CACHE_IN_USE, "the engine could not reset its prefix cache")


def _ignore(_stage: str) -> None:
    """Where nobody asked."""
