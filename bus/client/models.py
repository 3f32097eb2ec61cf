"""Selects the model of each request. Runs on the bus thread.

A request that names no model goes to the model that its client resolved first. Workers that come and go never change
it. The stored desired states name the models of a fleet, also models whose workers are all gone.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from ...schemas.checks import check_name, list_names
from ...schemas.control import DesiredState
from ...schemas.errors import BusBroken, InvalidRequest, NoWorkers
from ..control.store import DesiredStore
from ..nats.connection import Connection
from ..protocol.fleet.desired import desired_loras
from ..queue.streams import delete_queue, queue_depths
from .calls import Call
from .config import ClientConfig
from .presence import PING_WAIT_S, PresenceWatcher

T = TypeVar("T")
READ_S: Final = 1.0
"""Seconds between two reads of all stored states for names that no worker has, because any user may send such names."""
LOADED_S: Final = 1.0
"""Seconds to wait for the presence of a worker with a recorded adapter. It usually arrives within milliseconds."""


class ModelNames:
    """The models that a client knows.

    Attributes:
        fixed: the model of requests that name none. None until the first of them is resolved. It never changes
            afterwards, so any thread may read it.
    """

    def __init__(self, nats: Connection, config: ClientConfig, watcher: PresenceWatcher, store: DesiredStore) -> None:
        self.fixed: str | None = None
        self._nats = nats
        self._subjects = config.subjects
        self._wait_s = config.wait_for_workers_s
        self._watcher = watcher
        self._store = store
        self._recorded_models: _SharedRead[tuple[str, ...]] = _SharedRead()
        self._recorded_states: _SharedRead[dict[str, DesiredState]] = _SharedRead()

    async def known(self) -> tuple[str, ...]:
        """Return the models that live workers or stored desired states name, sorted.

        Raises:
            BusBroken: the stored states cannot be listed or read.
        """
        await self._watcher.known_workers()
        recorded = await self._recorded_models.get(self._store.models)
        served = {worker.model for worker in self._watcher.table.workers()}
        return await self._store.known_models(served, recorded)

    async def with_adapter(self, name: str) -> tuple[str, ...]:
        """Return the models for which an adapter is recorded. Wait up to a second for a worker that announces it.

        Raises:
            BusBroken: the stored states cannot be read.
        """
        states = await self._recorded_states.get(self._store.read_all, every_s=READ_S)
        found = tuple(sorted(model for model, state in states.items() if name in desired_loras(state)))
        if found:
            await self._watcher.wait_until(lambda: self._is_announced(name, found), LOADED_S)
        return found

    def _is_announced(self, name: str, models: tuple[str, ...]) -> bool:
        workers = (worker for worker in self._watcher.snapshot.workers if worker.model in models)
        return any(lora.name == name for worker in workers for lora in worker.loras)

    async def reset(self, model: str | None) -> tuple[str, ...]:
        """Clear the desired state of `model`, or of all models. Return the models that had recorded commands."""
        models = await self._store.models() if model is None else (check_name("model", model),)
        return tuple([name for name in models if await self._store.reset(name)])

    async def forget(self, model: str) -> bool:
        """Delete the queue and the desired state of a model that has no workers. Return False if it was unknown.

        Raises:
            InvalidRequest: the model has workers, or its queue has requests. Nothing was deleted.
            BusBroken: the connection or JetStream failed, or this user may not delete them. A repetition continues.
        """
        check_name("model", model)
        workers = [worker.worker for worker in await self._watcher.ping_workers() if worker.model == model]
        if workers:
            allowed = "a model without workers"
            raise InvalidRequest(
                field="model", problem=f"{model!r} has workers: {list_names(workers)}", allowed=allowed
            )
        depths = await queue_depths(self._nats, self._subjects, (model,))
        held = sum(depth.waiting + depth.in_hand for depth in depths)
        if held:
            problem = f"{model!r} has {held} requests in its queue"
            raise InvalidRequest(field="model", problem=problem, allowed="a model with an empty queue")
        was_known = bool(depths) or model in await self._recorded_models.get(self._store.models)
        # The state is deleted last. Until then the model is known, and the command can be repeated.
        await delete_queue(self._nats, self._subjects, model)
        await self._store.forget(model)
        return was_known

    async def resolve(self, model: str | None, call: Call) -> str:
        """Return the model that serves a request for `model`. Ask the workers first if none seems to serve it.

        With `wait_for_workers_s`, a known model needs no worker now, and a fleet without any model is waited for.

        Args:
            call: the request. If it is aborted, this waits no longer.

        Raises:
            NoWorkers: no worker serves the model, and none starts.
            InvalidRequest: no model was named and several are known, or only other models are known.
            BusBroken: no model was named, and the stored states cannot be listed.
        """
        try:
            return await self._resolve(self.fixed if model is None else model, call)
        except NoWorkers as exc:
            if self._nats.is_connected:
                raise
            raise NoWorkers(message=f"{exc.message}; the connection to NATS is down") from exc

    async def _resolve(self, model: str | None, call: Call) -> str:
        if model is None:
            model = await self._wait_fixed(call)
        await self._watcher.wait_awaited(model)
        known: tuple[str, ...] = (model,)
        if all(worker.model != model for worker in self._watcher.snapshot.workers):
            try:
                known = await self._recorded_models.get(self._store.models)
            except BusBroken:
                # The model may be known. A request that fails as `no_workers` may be sent again.
                known = (model,)
        try:
            return self._watcher.snapshot.resolve_model(model, known)
        except NoWorkers:
            if not self._wait_s:
                raise
            return model

    async def _wait_fixed(self, call: Call) -> str:
        """Choose the model of requests that name none, once. Wait for the fleet's first model if that is allowed."""
        until = min(time.monotonic() + self._wait_s, call.deadline_s)
        while True:
            try:
                return await self._fix()
            except NoWorkers:
                if call.is_aborted or time.monotonic() >= until:
                    raise
            await asyncio.sleep(PING_WAIT_S)

    async def _fix(self) -> str:
        """Choose the model of requests that name none, once."""
        try:
            known = await self.known()
        except BusBroken:
            if self._nats.is_connected:
                raise
            raise NoWorkers(message="the models of the fleet are unknown") from None
        if self.fixed is None:
            self.fixed = self._watcher.snapshot.choose_model(known)
        return self.fixed


class _SharedRead(Generic[T]):
    """A read whose result calls share that wait at the same time."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()
        self._tried_at = self._read_at = -math.inf
        self._found: T

    async def get(self, read: Callable[[], Awaitable[T]], *, every_s: float = 0.0) -> T:
        """Return what a read finds that begins after this call, and `every_s` seconds after the last one."""
        asked_at = time.monotonic()
        async with self._reading:
            if self._read_at < asked_at:
                await asyncio.sleep(max(self._tried_at + every_s - time.monotonic(), 0.0))
                self._tried_at = began_at = time.monotonic()
                self._found = await read()
                self._read_at = began_at
            return self._found
