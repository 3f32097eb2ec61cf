"""Replaces the weights of a worker. New weights are valid only after a canary has verified them.

`is_poisoned` is True from the moment when the engine may change the weights until the canary has passed, also if a load
is cancelled. During this time engine steps are held. The weight version changes after the canary has passed.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...schemas.control import LOAD_TIMEOUT_S, FinishWeightUpdate, PauseMode, UpdateWeights
from ...schemas.errors import ControlCode, ControlError, EngineDead
from ...schemas.weights import Canary, Verified, WeightSource
from ..config import WorkerConfig
from ..requests.in_flight import InFlightRequests
from ..sources.checkpoint import has_checkpoint
from ..sources.sources import WeightSources
from ..sources.threads import Report
from .canary import Canaries
from .content import StartCheck, check_content
from .loras import Loras
from .staging import Deadline, UpdateClock, check_supported

logger = logging.getLogger(__name__)

UNTOUCHED = frozenset({ControlCode.ENGINE_ERROR, ControlCode.UNSUPPORTED})
"""Error codes after which the weights of the engine are unchanged."""


class WeightManager:
    """The weights of one worker. This class never calls `InFlightRequests.resume`.

    Every coroutine raises `EngineDead` if the engine is dead.

    Args:
        config: contains the checkpoint of the start, and whether its reload is verified.
        loras: the adapters, which an engine may lose with its weights.
    """

    def __init__(self, config: WorkerConfig, in_flight: InFlightRequests, sources: WeightSources, loras: Loras) -> None:
        self._in_flight = in_flight
        self._sources = sources
        self._loras = loras
        self._versions = in_flight.links.versions
        self._own = None if config.model_path is None else Path(config.model_path)
        self._verifies_reload = config.prove_reload
        self._canaries = Canaries(in_flight)
        self._are_from_start = True
        self.source: WeightSource | None = None
        """Source of the last successful update. None without an update, or if the weights arrived by a transfer."""
        self.start = StartCheck(config, sources)
        self.digest: str | None = None
        """Digest of the tensors of the current weights, or None if it is unknown, as after a transfer."""
        self._content: str | None = None
        self.conflict: str | None = None
        """Why the desired weights are not at their source any more: it holds other content. None: they may be."""
        self.canary: Canary | None = None
        """Canary of the current weights, or None if it was not sampled."""
        self.verified: Verified | None = None
        """Comparison that the engine made during the load, or None if the engine reports none."""
        self.is_poisoned = False
        """True if the weights are invalid (half written or wrong). The worker then serves no requests."""
        self.problem: str | None = None
        """Reason why the weights are invalid, or None."""
        self.is_transferring = False
        """True while a transfer is open: the weights are half written."""
        self.clock = UpdateClock()
        """Clock of the last update or transfer."""

    @property
    def version(self) -> int:
        """Version of the weights that the engine samples from, or of the last valid weights while these are invalid."""
        return self._versions.weight_version

    @property
    def valid_digest(self) -> str | None:
        """Digest of the weights that the worker may serve, or None."""
        return None if self.is_poisoned or self.is_transferring else self.digest

    # Start

    async def verify_start(self) -> None:
        """Wait for the digest of the start, and verify the reload of the engine. Raises the errors of `verify_reload`.

        If a file changed after it was hashed, the content that the engine has loaded is unknown: it is invalid.
        """
        start_digest = await self.start.wait()
        # A worker whose engine may span machines has not read the files of the other machines.
        self.digest = start_digest if self._in_flight.runner.engine.capabilities.weight_digests else None
        if await self.start.is_unchanged():
            await self.verify_reload()
        if not await self.start.is_unchanged():
            self.mark_invalid(f"{self._own} changed during the load")
        self.conflict = await self.start.find_conflict(self.version, self.digest)

    async def verify_reload(self) -> None:
        """Load the checkpoint of the start a second time, and verify that the engine's output stays the same.

        Call this while no request is in flight and engine steps are read. It does nothing if the configuration disables
        it, if there is no checkpoint, or if the engine cannot replace its weights.

        Raises:
            EngineDead: the reload failed or changed the output. The message has the difference.
        """
        own, can_reload = self._own, self._in_flight.runner.engine.capabilities.weight_updates
        if not self._verifies_reload or not can_reload or own is None:
            return
        if not await asyncio.to_thread(has_checkpoint, own):
            return
        deadline = Deadline(LOAD_TIMEOUT_S)
        try:
            canary, content = await self._canaries.sample(deadline), self.digest or self._sources.digest_of(own)
            self._canaries.add(content, canary)
            await self._load(own, self.digest, deadline, lambda _stage: None, None if content else canary)
        except ControlError as exc:
            raise EngineDead(f"the engine cannot reload its own checkpoint {own}: {exc.message}") from exc
        logger.info("weights.verified version=%s path=%s", self.version, own)

    async def update(self, command: UpdateWeights, report: Report) -> Canary | None:
        """Replace the weights by the weights of a checkpoint. Later tokens have the new version.

        Do nothing if these weights are loaded already. Afterwards requests are stopped as `command.mode` requires, and
        the steps of the verification are held until the worker resumes.

        Args:
            report: called with each stage.

        Returns:
            The canary of the new weights, or None for the weights of the start, which have no canary.
        Cancellation: before the load nothing has changed. During or after the load the weights are invalid.

        Raises:
            ControlError: `invalid_command`, `unsupported`, `path_refused`, `bad_source`, `storage`, `timeout`,
                `cache_in_use`, `engine_error`, or `not_verified` of weights that are loaded already: the weights have
                not changed. `half_written`, `not_verified` or `timeout` with `is_poisoned`: the weights are invalid and
                the requests in flight have failed.
        """
        self.clock = UpdateClock()
        self._canaries.check_expected(command.expected_canary)
        if self.is_current(command):
            self.conflict = None
            if not self._are_from_start:
                self.source = command.source  # the same content elsewhere; the earlier directory may be gone
            if self.canary is not None:
                self._canaries.check_agrees(self.canary, command.expected_canary)
            return self.canary
        deadline = Deadline(command.timeout_s)
        path = await self._resolve(command.source, deadline, report)
        digest = self._check_content(command.version, command.digest, path, command.source)
        report("pausing")
        await self.stop(command.mode, deadline)
        clear_cache = command.mode != "keep" if command.clear_cache is None else command.clear_cache
        if clear_cache:
            # Do this before any change. The cache stays empty, because the engine caches nothing until it resumes.
            report("flushing")
            async with deadline.bound("flushing the cache"):
                await self._in_flight.reset_cache(preempt=command.mode == "keep")
        canary = await self._load(path, digest, deadline, report, command.expected_canary)
        self.set_version(command.version, command.source)
        return canary

    def is_current(self, command: UpdateWeights | FinishWeightUpdate) -> bool:
        """Return True if these weights are loaded, or if the engine was started with this version.

        Weights with a digest are loaded if the present weights have that digest, wherever they came from.
        """
        if self.version != command.version or self.is_poisoned or self.is_transferring:
            return False
        if isinstance(command, UpdateWeights) and command.digest is not None:
            return self.digest == command.digest
        source = command.source if isinstance(command, UpdateWeights) else None
        return self.conflict is None and (self._are_from_start or self.source == source)

    async def restore(self, report: Report, timeout_s: float) -> None:
        """Reload the current weights into an engine that has discarded them and has no request in flight.

        Raises:
            ControlError: the weights are not available or differ from before. They are then invalid.
        """
        deadline = Deadline(timeout_s)
        if not self.is_poisoned:
            self.is_poisoned, self.problem = True, "the engine has discarded its weights"
        path = self._own if self._are_from_start else None
        if self.source is not None:
            path = await self._resolve(self.source, deadline, report)
        elif path is not None and self.digest is not None:
            await self._sources.start_digest()
        if path is None:
            self.problem = f"{self.problem}, which cannot be loaded again"
            raise ControlError(ControlCode.HALF_WRITTEN, self.problem)
        try:
            digest = self._check_content(self.version, self.digest, path, self.source or path)
        except ControlError as exc:
            self.conflict = exc.message
            raise
        await self._load(path, digest, deadline, report, self.canary)

    def _check_content(self, version: int, digest: str | None, path: Path, source: object) -> str | None:
        """Check that a staged folder holds the recorded content of a version, and return the digest of the folder.

        Raises:
            ControlError: `other_content`; `unsupported`: this worker computes no digests.
        """
        is_able = self._in_flight.runner.engine.capabilities.weight_digests
        found = self._sources.digest_of(path) if is_able else None
        if digest is None:
            return found
        if not is_able:
            problem = f"version {version} has a digest, and this engine may span machines whose files are not compared"
            raise ControlError(ControlCode.UNSUPPORTED, problem)
        check_content(f"version {version}", digest, found, source)
        return digest

    def mark_invalid(self, reason: str, *, keeps_canary: bool = False) -> None:
        """Mark the weights invalid. The caller fails the requests in flight.

        Args:
            keeps_canary: True if the canary of their checkpoint stays the right one. Otherwise it is removed.
        """
        logger.error("weights.poisoned version=%s reason=%s", self.version, reason)
        if not keeps_canary:
            self._canaries.remove(self._content)
        self.is_transferring, self.is_poisoned, self.problem = False, True, reason

    async def _load(
        self, path: Path, digest: str | None, deadline: Deadline, report: Report, expected: Canary | None = None
    ) -> Canary:
        """Replace the weights by the weights of a checked checkpoint, if it still has this digest."""
        async with self._sources.using(path, digest) as verify_unchanged:

            async def load() -> Verified | None:
                try:
                    verified = await self._in_flight.runner.engine.load_weights(path)
                except ControlError as exc:
                    if exc.code not in UNTOUCHED:
                        # A change explains the error of the engine, which compares its weights with the files.
                        await verify_unchanged()
                    raise
                await verify_unchanged()
                return verified

            content = digest or self._sources.digest_of(path)
            return await self.replace(load, deadline, report, digest=digest, content=content, expected=expected)

    # For updates and transfers

    async def stop(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop requests as `mode` requires. On return all sampled tokens are in the links with the current version.

        Raises:
            ControlError: `timeout`.
        """
        await self._in_flight.stop(mode, deadline.left_s, "weights")
        self.clock = UpdateClock(time.monotonic())
        # Steps may be held since an earlier update during the same pause.
        self._in_flight.release_steps()
        self._in_flight.fail_awaiting_kv(None, "the weights are replaced")

    async def replace(
        self,
        change: Callable[[], Awaitable[Verified | None]],
        deadline: Deadline,
        report: Report,
        *,
        digest: str | None = None,
        content: str | None = None,
        expected: Canary | None = None,
    ) -> Canary:
        """Call `change`, which replaces the weights of the stopped engine, and verify them.

        Args:
            digest: digest of the new weights, or None if it is unknown.
            content: digest of the files of the new weights, with which they have one canary; None: it is unknown.
            expected: the expected canary, or None to accept every canary.

        Returns:
            The canary of the new weights. The caller sets the new version.
        Cancellation: the weights are invalid, and the requests in flight have failed.

        Raises:
            ControlError: `engine_error` or `unsupported` of `change`: the weights have not changed. After any other
                error the weights are invalid, and the requests in flight have failed.
        """
        before = self.is_poisoned, self.problem
        self.is_poisoned, self.problem = True, "the replacement of its weights was interrupted"
        try:
            report("loading")
            async with deadline.bound("loading the weights"):
                await self._change(change, before)
            await self._loras.reload(report, deadline)
            # Do this before the canary: while the canary runs, the engine executes steps for all requests.
            async with deadline.bound("restarting requests without a token"):
                await self._in_flight.restart(None)
            report("verifying")
            async with deadline.bound("verifying the weights"):
                canary = await self._sample_canary(deadline)
            self._canaries.check_agrees(canary, expected)
            self._canaries.check_known(canary, content)
            self._canaries.add(content, canary)
            self.canary, self.digest, self._content = canary, digest, content
            self.is_poisoned, self.problem, self.is_transferring, self.conflict = False, None, False, None
        except ControlError as exc:
            if self.is_poisoned:
                self.problem = exc.message
            raise
        finally:
            if self.is_poisoned:
                self.is_transferring = False
                logger.error("weights.poisoned version=%s reason=%s", self.version, self.problem)
                self._in_flight.discard_steps()
                self._in_flight.fail_for_retry(f"the weights of this worker are invalid: {self.problem}")
        return canary

    def set_version(self, version: int, source: WeightSource | None) -> None:
        """Set the version of the held steps and of all later tokens."""
        self._versions.weight_version = version
        self.source, self._are_from_start = source, False
        logger.info("weights.updated version=%s source=%s", version, source)

    async def _change(self, change: Callable[[], Awaitable[Verified | None]], before: tuple[bool, str | None]) -> None:
        began = time.monotonic()
        try:
            with self._in_flight.runner.emptying_cache():
                self.verified = await change()
        except ControlError as exc:
            if exc.code in UNTOUCHED:
                self.is_poisoned, self.problem = before
            raise
        finally:
            self.clock.loaded_s = time.monotonic() - began

    async def _sample_canary(self, deadline: Deadline) -> Canary:
        """Sample the canary. Hold the steps of other requests during this time."""
        was_paused = self._in_flight.runner.is_engine_paused
        self._in_flight.hold_steps()
        await self._in_flight.runner.resume()
        began = time.monotonic()
        canary = await self._canaries.sample(deadline)
        self.clock.canary_s = time.monotonic() - began
        if was_paused:
            await self._in_flight.pause_engine()
        return canary

    async def _resolve(self, source: WeightSource, deadline: Deadline, report: Report) -> Path:
        check_supported(source, self._in_flight.runner.engine.capabilities)
        async with deadline.bound("checking the checkpoint"):
            return await self._sources.checkpoint(source, report)
