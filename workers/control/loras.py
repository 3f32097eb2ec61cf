"""The LoRA adapters of a worker: loaded, replaced, unloaded, and loaded again after new weights.

Requests may name the adapters in `versions.loras`. A name is removed before the engine changes its adapter. It is added
after the engine has confirmed the load.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from ...schemas.control import LoadLora, UnloadLora
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import WeightSource
from ..requests.in_flight import InFlightRequests
from ..sources.sources import WeightSources
from ..sources.threads import Report
from .content import check_content
from .staging import Deadline, StageKey, check_supported

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter in the engine, or one that the engine had before its weights were replaced."""

    source: WeightSource
    version: int
    digest: str | None
    """Recorded digest of the adapter, or None if it is unpinned."""
    for_base: bool = False
    """True if requests for the model itself use the adapter."""


class Loras:
    """The adapters of one worker. This class never calls `InFlightRequests.resume`.

    Every coroutine raises `EngineDead` if the engine is dead.
    """

    def __init__(self, in_flight: InFlightRequests, sources: WeightSources) -> None:
        self._in_flight = in_flight
        self._sources = sources
        self._versions = in_flight.links.versions
        # Bounded by the number of adapters that the engine can hold.
        self._loaded: dict[str, LoadedLora] = {}
        self.lost: dict[str, str] = {}
        """Adapters that the engine lost with older weights, with the reasons, until their next load or unload."""

    @property
    def problem(self) -> str | None:
        """Text with the lost adapters, or None if none was lost."""
        lost = [f"adapter {name} was lost with older weights: {reason}" for name, reason in sorted(self.lost.items())]
        return "; ".join(lost)[:MAX_ERROR_CHARS] or None

    @property
    def stage_keys(self) -> tuple[StageKey, ...]:
        """Object-store sources of the loaded adapters, because an engine may lose its adapters with its weights."""
        sources = (loaded.source for loaded in self._loaded.values() if loaded.source.objects is not None)
        return tuple(StageKey(source, is_adapter=True) for source in sources)

    @property
    def names(self) -> frozenset[str]:
        """Names of the loaded adapters, and of those that were lost with older weights."""
        return frozenset({*self._loaded, *self.lost})

    def is_current(self, command: LoadLora) -> bool:
        """Return True if this adapter is loaded already: by its digest, or without a digest by its source."""
        loaded = self._loaded.get(command.name)
        if loaded is None or loaded.version != command.version or loaded.digest != command.digest:
            return False
        return command.digest is not None or loaded.source == command.source

    async def load(self, command: LoadLora, report: Report) -> None:
        """Load an adapter, or replace the adapter with the same name. Later tokens use the new adapter.

        Requests in flight continue with the next resume. Afterwards the engine is paused. If this adapter is loaded
        already, change only the source of its next reload.

        Args:
            report: called with each stage.
        Cancellation: the same as a timeout.

        Raises:
            ControlError: `unsupported`, `path_refused`, `bad_source`, `storage` or `timeout` before the load: nothing
                has changed. `engine_error`: the worker keeps the old adapter, unless the engine has lost it. `timeout`
                during the load, or `storage` because files changed during the load: no adapter has the name.
        """
        desired = LoadedLora(command.source, command.version, command.digest, command.for_base)
        if self.is_current(command):
            self._loaded[command.name] = desired
            return
        capabilities = self._in_flight.runner.engine.capabilities
        check_supported(command.source, capabilities, is_adapter=True)
        if command.name not in self._loaded and len(self._loaded) >= capabilities.max_loras:
            held = f"{capabilities.max_loras} adapters and has {', '.join(sorted(self._loaded))}"
            raise ControlError(ControlCode.ENGINE_ERROR, f"this engine can hold {held}; unload an adapter first")
        deadline = Deadline(command.timeout_s)
        async with deadline.bound("checking the adapter"):
            path = await self._sources.adapter(command.source, report, max_rank=capabilities.max_lora_rank)
        self._check_content(command.name, desired, path)
        report("pausing")
        await self._in_flight.stop("keep", deadline.left_s, "lora")
        self._in_flight.release_steps()
        self._in_flight.fail_awaiting_kv(command.name, f"the adapter {command.name} is replaced")
        report("loading")
        await self._replace(command.name, desired, path, deadline)
        if command.for_base:
            self._in_flight.fail_without_adapter("an adapter answers under the name of the model now")
        async with deadline.bound("restarting requests without a token"):
            await self._in_flight.restart(command.name)
        logger.info("lora.loaded name=%s version=%s", command.name, command.version)

    def _check_content(self, name: str, desired: LoadedLora, path: Path) -> None:
        """Check that a staged folder holds the recorded content of an adapter.

        Raises:
            ControlError: `other_content`.
        """
        what = f"version {desired.version} of adapter {name}"
        check_content(what, desired.digest, self._sources.digest_of(path), desired.source)

    async def _replace(self, name: str, desired: LoadedLora, path: Path, deadline: Deadline) -> None:
        """Load an adapter into the paused engine if its files have not changed since they were checked."""
        engine = self._in_flight.runner.engine
        async with self._sources.using_adapter(path, desired.digest) as verify_unchanged:
            before, now = self._remove(name), None
            try:
                async with deadline.bound(f"loading the adapter {name}"):
                    await engine.load_lora(name, path, desired.version)
                    try:
                        await verify_unchanged()
                    except ControlError:
                        before = None
                        # If this unload fails, the engine keeps the adapter, but no request can name it.
                        with contextlib.suppress(ControlError):
                            await engine.unload_lora(name)
                        raise
                now = desired
            except ControlError as exc:
                now = self._find_remaining(name, before, exc)
                raise
            finally:
                self._record(name, now, "its adapter was lost in a failed load")

    async def unload(self, command: UnloadLora) -> None:
        """Unload an adapter. Do nothing if it is not loaded.

        This removes its name, aborts the requests that use it, and then unloads it from the engine. Requests for the
        model itself continue on the weights.

        Cancellation: the same as a timeout.

        Raises:
            ControlError: `engine_error`: the engine kept the adapter, and requests may name it again. `timeout`:
                requests may not name it.
        """
        name, engine = command.name, self._in_flight.runner.engine
        # Steps may be held since an update during a pause. Tokens of the adapter must leave with its version.
        self._in_flight.release_steps()
        before, now = self._remove(name), None
        if before is None and name not in engine.loras:
            return
        try:
            async with Deadline(command.timeout_s).bound(f"unloading the adapter {name}"):
                await self._abort_users(name, is_base=before is not None and before.for_base)
                await engine.unload_lora(name)
        except ControlError as exc:
            now = self._find_remaining(name, before, exc)
            raise
        finally:
            self._record(name, now, "its adapter was unloaded")
        logger.info("lora.unloaded name=%s", name)

    async def _abort_users(self, name: str, *, is_base: bool) -> None:
        """Abort the requests that use an adapter, and wait until the engine does not have them."""
        names = self._in_flight.links.requests.names_using(name)
        if is_base:
            self._in_flight.fail_using(name, "no adapter answers under the name of the model any more")
        if not self._in_flight.runner.is_engine_paused:
            await self._in_flight.abort_and_wait(names)
            return
        # A paused engine may need a step to abort. The steps of other requests are held until the worker resumes, but
        # these requests end for their clients now.
        self._in_flight.abort(names)
        self._in_flight.hold_steps()
        await self._in_flight.runner.resume()
        try:
            await self._in_flight.abort_and_wait(names)
        finally:
            await self._in_flight.pause_engine()

    async def reload(self, report: Report, deadline: Deadline) -> None:
        """Reload the adapters that the paused engine lost with its weights. Add failed adapters to `lost`."""
        for name, loaded in list(self._loaded.items()):
            if self._in_flight.runner.engine.loras.get(name) == loaded.version:
                continue
            report("loading")
            try:
                async with deadline.bound(f"checking the adapter {name}"):
                    path = await self._sources.adapter(loaded.source, report, is_reload=True)
                self._check_content(name, loaded, path)
                await self._replace(name, loaded, path, deadline)
            except ControlError as exc:
                logger.error("lora.reload_failed name=%s version=%s error=%s", name, loaded.version, exc)
                self._record(name, None, "its adapter could not be reloaded after new weights")
                self.lost[name] = exc.message

    def _remove(self, name: str) -> LoadedLora | None:
        """Remove a name and return its adapter, because it is now unknown whether the engine has the adapter."""
        self.lost.pop(name, None)
        self._versions.loras.pop(name, None)
        return self._loaded.pop(name, None)

    def _find_remaining(self, name: str, before: LoadedLora | None, error: ControlError) -> LoadedLora | None:
        """Return the adapter that the engine still has under this name after `error`, or None. None after a timeout."""
        if before is None or error.code is ControlCode.TIMEOUT:
            return None
        return before if self._in_flight.runner.engine.loras.get(name) == before.version else None

    def _record(self, name: str, now: LoadedLora | None, reason: str) -> None:
        """Record the adapter of this name. If `now` is None, fail its requests, which other workers resume."""
        if now is None:
            self._versions.loras.pop(name, None)
            self._loaded.pop(name, None)
            self._in_flight.fail_using(name, reason)
        else:
            self._loaded[name] = now
            self._versions.loras[name] = now.version
