"""Calls into the engine other than requests. A call fails when the engine ends, and its error states the cause."""

import asyncio
import contextlib
import operator
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ControlCode, ControlError, EngineDead, ForeignError, foreign_code

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


WORKERS_TIMEOUT_S = 3600.0
"""Timeout of a call to all vLLM worker processes; longer than any load of weights. After a timeout, vLLM would use the
late answers for the next calls (v1/executor/multiproc_executor.py: collective_rpc), so no answer would be reliable."""


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Raise `EngineDead` for the errors with which vLLM reports that its engine core has ended."""
    import zmq
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except (EngineDeadError, zmq.ZMQError) as exc:
        raise EngineDead(f"the engine has ended: {type(exc).__name__}: {exc}") from exc


def check_supported(refusal: str | None) -> None:
    """Raise `unsupported` with the reason `refusal`; None: the engine supports the operation."""
    if refusal is not None:
        raise ControlError(ControlCode.UNSUPPORTED, refusal)


class Calls:
    """Calls methods of a running engine; one object per engine."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._death: str | None = None
        self._waits: set[asyncio.Timeout] = set()

    def end(self, reason: str) -> None:
        """Record that the engine has ended, and fail all calls that wait for it. vLLM would let them wait forever."""
        self._death = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    @contextlib.asynccontextmanager
    async def until_death(self) -> AsyncIterator[None]:
        """Run the block, and cancel it when the engine ends.

        Raises:
            EngineDead: the engine has ended, before the block or during it.
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
        """Call a method of vLLM's `AsyncLLM`, or of one of its attributes if `name` is dotted.

        Cancellation: the engine continues the operation.

        Raises:
            ControlError: `unsupported`: this release lacks the method; `engine_error`: the method raised an error.
            EngineDead: the engine has ended.
        """
        try:
            method = operator.attrgetter(name)(self._llm)
        except AttributeError:
            raise ControlError(ControlCode.UNSUPPORTED, f"this release of vLLM has no {name}") from None
        async with self.until_death():
            try:
                with foreign_code(EngineDead), engine_errors():
                    return await method(*args, **options)
            except ForeignError as exc:
                # vLLM raises errors of the engine core as plain Exceptions (core_client.py: _process_utility_output).
                raise ControlError(ControlCode.ENGINE_ERROR, f"vLLM failed the call: {exc.cause}") from exc

    async def on_workers(self, method: str, **options: Any) -> list[dict[str, Any]]:
        """Call a method of `WorkerExtension` in every vLLM worker process, and return their answers.

        Do not call vLLM's own methods this way. If such a method raises in one of several processes, vLLM leaves the
        answers of the other processes unread and uses them for the next call. Its engine core may then not shut down.

        Raises:
            ControlError: the error that all processes answered; `half_written` if their answers differ or vLLM failed
                the call.
            EngineDead: the engine has ended.
        """
        try:
            replicas = await self.on_replicas("collective_rpc", method, WORKERS_TIMEOUT_S, (), options)
        except ControlError as exc:
            raise ControlError(ControlCode.HALF_WRITTEN, exc.message) from exc
        found: list[dict[str, Any]] = [answer for answers in replicas for answer in answers]
        failed = [answer for answer in found if answer["code"] is not None]
        if failed:
            is_same = len(failed) == len(found) and len({answer["code"] for answer in failed}) == 1
            code = ControlCode(failed[0]["code"]) if is_same else ControlCode.HALF_WRITTEN
            raise ControlError(code, failed[0]["error"])
        return found

    async def on_replicas(self, name: str, *args: Any) -> list[Any]:
        """Call a method that both `AsyncLLM` and the engine core have, in every replica; return all answers.

        With several replicas, `AsyncLLM` itself returns only the answer of the first replica; not every release returns
        all the answers that matter (v1/engine/core_client.py: DPLBAsyncMPClient).

        Cancellation: the engine continues the operation.

        Raises:
            ControlError: as in `call`, after each replica has answered.
            EngineDead: the engine has ended.
        """
        return await self._on_all(name, args) or [await self.call(name, *args)]

    async def on_cores(self, name: str, *args: Any) -> list[Any]:
        """Call a method that only the engine core has, in every replica; see `on_replicas`."""
        return await self._on_all(name, args) or [await self.call("engine_core.call_utility_async", name, *args)]

    async def _on_all(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """Call the method in each replica and return the answers; return an empty list if there is only one replica."""
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
        """Return the answer of one replica, or its error, so that the caller still waits for the other replicas."""
        try:
            return await self.call("engine_core._call_utility_async", name, *args, engine=engine)
        except (EngineDead, ControlError) as exc:
            return exc
