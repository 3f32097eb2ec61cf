"""The other HTTP services of the fleet: a request that waits at one service is listed and aborted at each of them.

Each service publishes on a subject of its own, which only HTTP services may receive, and says every 2 s that it lives.
So a service that asks the others knows how many answers to wait for, and names those that did not answer.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from ....bus.auth.credentials import Role
from ....bus.client.client import runtime_of
from ....bus.logs import RejectionCount, warning_of
from ....bus.nats.connection import publish, subscribe_permitted
from ....bus.nats.library import Msg
from ....bus.protocol.fleet.authority import check_age
from ....schemas.checks import list_names
from ....schemas.errors import ControlError, RemoteProtocolError, RollbusError
from ....schemas.messages import decode_service_message, encode_json
from ....schemas.telemetry import ServiceMessage, WaitingRequest
from ..live.viewers import contained
from ..service import ABORT_TIMEOUT_S, Service

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 2.0
LEASE_S: Final = 6.0
"""Seconds after which a silent service counts as ended, as for workers."""
ANSWER_S: Final = {"list": 5.0, "abort": ABORT_TIMEOUT_S + 2.0}
"""Seconds for the answers of other services by what they are asked: as for workers, and more than an abort takes."""
AGAIN_S: Final = 60.0
"""Seconds until the next attempt if NATS does not permit these messages."""
MAX_BYTES: Final = 1_000_000
"""Largest message: with its headers, the default limit of NATS servers. Longer answers are cut, and say so."""
MAX_SERVICES: Final = 64
"""Other services that count. More behind one balancer are a mistake, or somebody who floods a server without users."""
MAX_ANSWERING: Final = 16
"""Questions that are answered at a time. Further ones get no answer: each may be an abort that takes seconds."""
MAX_REMEMBERED: Final = 256
"""Ids of questions, so that a copy of a message has no effect while its signature is valid."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that no worker has, at the HTTP services that answered."""

    requests: tuple[WaitingRequest, ...] = ()
    """The requests, those of this service first."""
    left_out: int = 0
    """Number of further requests that did not fit into an answer."""
    silent: tuple[str, ...] = ()
    """Client names of the live services that did not answer. What waits there is not known."""

    @property
    def note(self) -> str:
        """What is not known, for people; empty: nothing."""
        return f"No answer from HTTP services: {list_names(self.silent)}" if self.silent else ""


class Services:
    """Finds and aborts requests that wait at any HTTP service of the fleet. Asks and answers while `serving` lasts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # The other services by their client names, with the times of their last messages.
        self._others: dict[str, float] = {}
        self._questions: dict[str, asyncio.Queue[tuple[str, ServiceMessage]]] = {}
        self._seen: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._num_answering = 0
        self._tasks: asyncio.TaskGroup
        self._is_serving = False
        self._rejected = RejectionCount()
        runtime = runtime_of(service.rb)
        self._thread, self._nats, self._name = runtime.thread, runtime.nats, runtime.config.client
        self._subjects = runtime.config.subjects

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the other services while the block lasts."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                running = self._tasks.create_task(self._run())
                self._is_serving = True
                try:
                    yield
                finally:
                    # Until NATS has ended the subscription, messages arrive for which the group takes no tasks.
                    self._is_serving = False
                    running.cancel()
        finally:
            await self._say(ServiceMessage(ends=True))

    async def find(
        self, asks: Literal["list", "abort"], model: str | None, ids: Collection[str] | None = None
    ) -> Waiting:
        """List or abort the waiting requests of all services; an abort also ends those of a service that workers have.

        Args:
            ids: ids of the requests, as their clients chose them; None: all.
        """
        names = None if ids is None else tuple(ids)
        asked = ServiceMessage(id=uuid.uuid4().hex, asks=asks, model=model, request_ids=names)
        answers = self._questions[asked.id] = asyncio.Queue(MAX_SERVICES)
        silent, found, left_out = {*self._others}, list[WaitingRequest](), 0
        try:
            is_asked = bool(silent) and await self._say(asked)
            found += (replace(each, service=self._name) for each in await self._handle(asked))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S[asks]):
                    # A service without a sign of life will not answer.
                    while is_asked and silent & self._others.keys():
                        try:
                            name, told = await asyncio.wait_for(answers.get(), HEARTBEAT_S)
                        except TimeoutError:
                            continue
                        if name in silent:
                            silent.remove(name)
                            found += (replace(each, service=name) for each in told.waiting)
                            left_out += told.left_out
        finally:
            del self._questions[asked.id]
        return Waiting(requests=tuple(found), left_out=left_out, silent=tuple(sorted(silent)))

    async def _handle(self, asked: ServiceMessage) -> list[WaitingRequest]:
        if asked.asks == "abort":
            ended = await self._service.abort_open(asked.model, asked.request_ids)
            return [WaitingRequest(request_id=given, wire_id=name) for name, given in ended.items()]
        return await self._service.waiting(asked.model, asked.request_ids)

    async def _run(self) -> None:
        while True:
            with contained("services"), warning_of(RollbusError, logger, "services.not_connected error=%s"):
                await self._live()
            await asyncio.sleep(AGAIN_S)

    async def _live(self) -> None:
        subscription = await self._thread.run(
            subscribe_permitted(self._nats, self._subjects.services, self._on_message)
        )
        try:
            while True:
                await self._say(ServiceMessage())
                oldest = time.monotonic() - LEASE_S
                self._others = {name: heard_at for name, heard_at in self._others.items() if heard_at > oldest}
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            if not self._nats.is_closed:
                with contextlib.suppress(RollbusError):
                    await self._thread.run(subscription.unsubscribe())

    async def _say(self, message: ServiceMessage) -> bool:
        """Publish a message, with as many requests as it can have. Return False if that is not possible."""
        most = min(MAX_BYTES, self._nats.max_payload)
        while len(data := encode_json(message)) > most and (count := len(message.waiting)):
            left_out = message.left_out + count - count // 2
            message = replace(message, waiting=message.waiting[: count // 2], left_out=left_out)
        subject = self._subjects.service(self._name)
        headers = self._nats.signatures.headers(subject, data) or None
        try:
            await self._thread.run(publish(self._nats, subject, data, headers=headers))
        except RollbusError as error:
            logger.warning("services.publish_failed error=%s", error)
            return False
        return True

    def _on_message(self, message: Msg) -> None:
        # On the bus thread.
        name = message.subject.rpartition(".")[2]
        try:
            signed = self._nats.signatures.check(message.subject, message.data, message.headers)
            if signed is not None:
                if (signed.by.role, signed.by.name) != (Role.FRONTEND, name):
                    raise RemoteProtocolError(f"the message is signed by the {signed.by.role} {signed.by.name}")
                check_age(signed.age_s)
            if len(message.data) > MAX_BYTES:
                raise RemoteProtocolError(f"service message: {len(message.data)} bytes; allowed: {MAX_BYTES}")
            told = decode_service_message(message.data)
        except (ControlError, RemoteProtocolError) as exc:
            self._rejected.warn(logger, "services.rejected subject=%s so_far=%s error=%s", message.subject, exc)
            return
        if name != self._name:
            self._thread.call_soon_in_owner_loop(partial(self._receive, name, told))

    def _receive(self, name: str, told: ServiceMessage) -> None:
        if not self._is_serving:
            return
        if told.ends:
            # It has nothing that waits. So this is its answer to all open questions.
            self._others.pop(name, None)
            for waiting in self._questions.values():
                if not waiting.full():
                    waiting.put_nowait((name, told))
            return
        if name not in self._others:
            if len(self._others) >= MAX_SERVICES:
                return
            # The new service learns at once that this one lives.
            self._tasks.create_task(self._say(ServiceMessage()))
        self._others[name] = time.monotonic()
        if told.asks is None:
            if (answers := self._questions.get(told.id)) is not None and not answers.full():
                answers.put_nowait((name, told))
        elif told.id not in self._seen and self._num_answering < MAX_ANSWERING:
            self._seen.append(told.id)
            # Counted here: many questions may arrive before the first task runs.
            self._num_answering += 1
            self._tasks.create_task(self._answer(told))

    async def _answer(self, asked: ServiceMessage) -> None:
        with contained("services"):
            await self._say(ServiceMessage(id=asked.id, waiting=tuple(await self._handle(asked))))
        self._num_answering -= 1
