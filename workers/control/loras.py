"""The LoRA adapters of a worker: loaded, swapped, unloaded, and brought back after new weights.

What requests may name stands in `versions.loras`, and an adapter is there only while the engine has it for certain. A
name leaves before its adapter is touched for good, and comes back only after the engine has said that it has it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schemas.control import LoadLora, UnloadLora, WeightSource
from schemas.errors import ControlCode, ControlError
from schemas.limits import MAX_ERROR_CHARS
from workers.control.deadline import Deadline
from workers.control.flow import Flow
from workers.engine_runner import EngineRunner
from workers.sources import Sources
from workers.versions import Versions

__all__ = ["Loras"]

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that the engine has, or had before its weights were replaced."""

    source: WeightSource
    version: int


class Loras:
    """The adapters of one worker; it never calls `Flow.go`.

    Args:
        versions: of which `loras` is kept here.
    """

    def __init__(self, runner: EngineRunner, flow: Flow, sources: Sources, versions: Versions) -> None:
        self._runner = runner
        self._flow = flow
        self._sources = sources
        self._versions = versions
        # At most as many as the engine holds.
        self._loaded: dict[str, Loaded] = {}
        self.gone: dict[str, str] = {}
        """Adapters that were lost with older weights, with the reason, until they are loaded or unloaded again."""

    def __repr__(self) -> str:
        """One line with the versions."""
        return f"<Loras {self._versions.loras} gone={sorted(self.gone)}>"

    @property
    def problem(self) -> str | None:
        """What was lost, for people; None: nothing."""
        lost = [f"adapter {name} was lost with older weights: {reason}" for name, reason in sorted(self.gone.items())]
        return "; ".join(lost)[:MAX_ERROR_CHARS] or None

    def is_current(self, command: LoadLora) -> bool:
        """There is nothing to load: it is here."""
        return self._loaded.get(command.name) == _wanted(command)

    async def load(self, command: LoadLora, report: Report) -> None:
        """Load an adapter, or replace the one of its name: what was sampled before is of the old one, all else of this.

        Requests in flight are kept, and the engine is frozen afterwards.

        Args:
            report: told what is being done.
        Cancellation: as after a timeout.

        Raises:
            ControlError: `unsupported`, `path_refused`, `bad_source`, `storage`, and `timeout` before the load: all is
                as it was. `engine_error`: the one of its name is as it was, or not here any more if the engine has lost
                it. `timeout` of the load: it is not here any more.
            EngineDead: the engine is gone.
        """
        self._check_room(command.name)
        deadline = Deadline(command.timeout_s)
        async with deadline.bound("checking the adapter"):
            path = await self._sources.adapter(command.source, report)
        report("pausing")
        await self._flow.stop("keep", deadline.left_s)
        self._flow.release_steps()
        self._flow.break_legs(lambda lora: lora == command.name, f"the adapter {command.name} is replaced")
        report("loading")
        await self._put(command.name, _wanted(command), path, deadline)
        logger.info("lora.loaded name=%s version=%s", command.name, command.version)

    def _check_room(self, name: str) -> None:
        max_loras = self._runner.engine.capabilities.max_loras
        if not max_loras:
            raise ControlError(
                ControlCode.UNSUPPORTED,
                "this engine takes no LoRA adapters; its arguments may allow them, vLLM's with 'enable_lora'",
            )
        if name not in self._loaded and len(self._loaded) >= max_loras:
            problem = f"this engine holds {max_loras} adapters and has {', '.join(sorted(self._loaded))}"
            raise ControlError(ControlCode.ENGINE_ERROR, f"{problem}; unload one of them first")

    async def _put(self, name: str, wanted: Loaded, path: Path, deadline: Deadline) -> None:
        """Have the frozen engine load an adapter."""
        before, now = self._take_away(name), None
        try:
            async with deadline.bound(f"loading the adapter {name}"):
                await self._runner.engine.load_lora(name, path, wanted.version)
            now = wanted
        except ControlError as exc:
            now = self._left(name, before, exc)
            raise
        finally:
            self._settle(name, now, "its adapter was lost in a load that failed")

    async def unload(self, command: UnloadLora) -> None:
        """Unload an adapter; one that is not here is fine.

        In this order: requests may not name it any more; those in flight that do are ended with ABORT; the engine
        drops it.

        Cancellation: as after a timeout.

        Raises:
            ControlError: `engine_error`: the engine has kept it, and it may be named again. `timeout`: it may not.
            EngineDead: the engine is gone.
        """
        name, engine = command.name, self._runner.engine
        # Held since an update under a pause: what was made with the adapter bears its version.
        self._flow.release_steps()
        before, now = self._take_away(name), None
        if before is None and name not in engine.loras:
            return
        try:
            async with Deadline(command.timeout_s).bound(f"unloading the adapter {name}"):
                await self._end_users(name)
                await engine.unload_lora(name)
        except ControlError as exc:
            now = self._left(name, before, exc)
            raise
        finally:
            self._settle(name, now, "its adapter was unloaded")
        logger.info("lora.unloaded name=%s", name)

    async def _end_users(self, name: str) -> None:
        """End requests that use an adapter, until the engine has let go of them."""
        if not self._runner.is_frozen:
            await self._flow.end_where(lambda lora: lora == name)
            return
        # A frozen engine may have to make a step for it: what that brings for others waits until the worker goes on.
        self._flow.hold_steps()
        await self._flow.thaw()
        try:
            await self._flow.end_where(lambda lora: lora == name)
        finally:
            await self._flow.freeze()

    async def bring_back(self, report: Report, deadline: Deadline) -> None:
        """Load again what the frozen engine has lost with its weights; what cannot be loaded stands in `gone`.

        Raises:
            EngineDead: the engine is gone.
        """
        for name, loaded in list(self._loaded.items()):
            if self._runner.engine.loras.get(name) == loaded.version:
                continue
            report("loading")
            try:
                async with deadline.bound(f"checking the adapter {name}"):
                    path = await self._sources.adapter(loaded.source, report)
                await self._put(name, loaded, path, deadline)
            except ControlError as exc:
                logger.error("lora.gone name=%s version=%s error=%s", name, loaded.version, exc)
                self._settle(name, None, "its adapter could not be brought back after new weights")
                self.gone[name] = exc.message

    def _take_away(self, name: str) -> Loaded | None:
        """Requests may not name it while nobody knows what the engine has."""
        self.gone.pop(name, None)
        self._versions.loras.pop(name, None)
        return self._loaded.pop(name, None)

    def _left(self, name: str, before: Loaded | None, error: ControlError) -> Loaded | None:
        """What the engine still has of this name after `error`; after a timeout it may be doing anything."""
        if before is None or error.code is ControlCode.TIMEOUT:
            return None
        return before if self._runner.engine.loras.get(name) == before.version else None

    def _settle(self, name: str, now: Loaded | None, reason: str) -> None:
        """Say what is here of this name; without any, other workers may go on with what used it."""
        if now is None:
            self._versions.loras.pop(name, None)
            self._loaded.pop(name, None)
            self._flow.give_up_where(lambda lora: lora == name, reason)
        else:
            self._loaded[name] = now
            self._versions.loras[name] = now.version


def _wanted(command: LoadLora) -> Loaded:
    return Loaded(command.source, command.version)
