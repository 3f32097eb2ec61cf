"""Calls into the engine besides requests. Each ends at the latest when the engine does, and says what was refused."""

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ControlCode, ControlError, EngineDead
from ....schemas.foreign_code import ForeignError, foreign_code

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["Calls", "check_supported"]

WORKERS_TIMEOUT_S = 3600.0
"""For what all of vLLM's worker processes do together: above any load of weights. Beyond it their answers would be
taken for those to later calls (v1/executor/multiproc_executor.py: collective_rpc), and nothing can be relied on."""


def check_supported(refusal: str | None) -> None:
    """Raise `unsupported` with the reason why the engine cannot do something; None: it can."""
    if refusal is not None:
        raise ControlError(ControlCode.UNSUPPORTED, refusal)


class Calls:
    """Calls methods of a running engine; one object per engine."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._death: str | None = None
        self._waits: set[asyncio.Timeout] = set()

    def end(self, reason: str) -> None:
        """The engine is gone: whoever waits for it hears so now. vLLM leaves callers waiting for ever."""
        self._death = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    @contextlib.asynccontextmanager
    async def until_death(self) -> AsyncIterator[None]:
        """Run the block, but no longer than the engine lives.

        Raises:
            EngineDead: the engine was gone, or went under way.
        """
        if self._death is not None:
            raise EngineDead(self._death)
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._waits.add(wait)
                yield
        except TimeoutError:
            if not wait.expired():
                raise
            raise EngineDead(str(self._death)) from None
        finally:
            self._waits.discard(wait)

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's `AsyncLLM`, or with a dotted name of a part of it.

        Cancellation: the engine goes on with what was asked of it.

        Raises:
            ControlError: `unsupported`, this release has no such method; `engine_error`, it raised something.
            EngineDead: the engine is gone.
        """
        import zmq
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            method = operator.attrgetter(name)(self._llm)
        except AttributeError:
            raise ControlError(ControlCode.UNSUPPORTED, f"this release of vLLM has no {name}") from None
        async with self.until_death():
            try:
                with foreign_code(EngineDeadError, zmq.ZMQError):
                    return await method(*args, **options)
            except (EngineDeadError, zmq.ZMQError) as exc:
                raise EngineDead(f"the engine is gone: {type(exc).__name__}: {exc}") from exc
            except ForeignError as exc:
                # What the engine core raised comes back as a bare Exception (core_client.py: _process_utility_output).
                raise ControlError(ControlCode.ENGINE_ERROR, f"vLLM says: {exc.cause}") from exc

    async def on_workers(self, method: str, **options: Any) -> list[dict[str, Any]]:
        """Call a method of `WorkerExtension` in every worker process; returns their answers, see `answers`.

        Not vLLM's own methods: when one of them raises in one of several processes, vLLM leaves the answers of the
        others unread and takes them for those to the next call; and its engine core may not end when it is told to.

        Raises:
            ControlError: what all of them answered; `half_written` where they differ, or vLLM did not get so far.
            EngineDead: the engine is gone.
        """
        try:
            found = await self._ask_workers(method, options)
        except ControlError as exc:
            raise ControlError(ControlCode.HALF_WRITTEN, exc.message) from exc
        failed = [answer for answer in found if answer["code"] is not None]
        if failed:
            is_same = len(failed) == len(found) and len({answer["code"] for answer in failed}) == 1
            code = ControlCode(failed[0]["code"]) if is_same else ControlCode.HALF_WRITTEN
            raise ControlError(code, failed[0]["error"])
        return found

    async def on_replicas(self, name: str, *args: Any) -> list[Any]:
        """Call a method that `AsyncLLM` and the engine core have in every replica; returns their answers.

        Of several, `AsyncLLM` returns the first one's answer only, and not in every release all that count
        (v1/engine/core_client.py: DPLBAsyncMPClient).

        Cancellation: the engine goes on with what was asked of it.

        Raises:
            ControlError: as `call`, when each replica has answered.
            EngineDead: the engine is gone.
        """
        return await self._on_all(name, args) or [await self.call(name, *args)]

    async def on_cores(self, name: str, *args: Any) -> list[Any]:
        """Call a method that only the engine core has, in every replica; as `on_replicas`."""
        return await self._on_all(name, args) or [await self.call("engine_core.call_utility_async", name, *args)]

    async def _on_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """Call it in each of several replicas; returns nothing where there is only one."""
        engines = getattr(self._llm.engine_core, "core_engines", ())
        if len(engines) < 2:
            return []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._on_replica(engine, name, args)) for engine in engines]
        found = [task.result() for task in tasks]
        for kind in (EngineDead, ControlError):
            for answer in found:
                if isinstance(answer, kind):
                    raise answer
        return found

    async def _on_replica(self, engine: Any, name: str, args: tuple[Any, ...]) -> Any:
        """Return what one answers, or its error: the others are waited for nevertheless."""
        try:
            return await self.call("engine_core._call_utility_async", name, *args, engine=engine)
        except (EngineDead, ControlError) as exc:
            return exc

    async def _ask_workers(self, method: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        found: list[list[dict[str, Any]]] = await self.on_replicas(
            "collective_rpc", method, WORKERS_TIMEOUT_S, (), options
        )
        return [answer for answers in found for answer in answers]
