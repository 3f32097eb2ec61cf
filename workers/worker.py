"""One worker: takes requests from the bus, feeds an engine, sends what it makes back to who asked.

Every request that was taken ends with one terminal chunk to its client, unless the process is killed or its
connection is lost: of that, clients learn by the worker's lease or by its new incarnation.
"""

import asyncio
import logging
import time
import uuid

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.connection import Connection, close_connection, drain, open_connection, publish, subscribe
from bus.subjects import Subjects
from schemas.errors import BusBroken, EngineDead, ErrorCode, RemoteProtocolError, RequestError, RequestRejected
from schemas.messages import (
    RequestKey,
    RequestMessage,
    decode_link_message,
    decode_request,
    decode_request_message,
    encode_json,
    request_id_of,
)
from schemas.presence import WorkerPresence, WorkerState
from workers.admission import check_request
from workers.config import WorkerConfig
from workers.engine import Engine
from workers.streams import Streams, engine_key

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LEASE_S = 5.0
"""Five heartbeats: a busy machine may delay a few, and a dead worker is still noticed soon."""
MAX_WAITING = 4096
"""Requests beyond those that the engine runs at once; past it they are refused with `queue_full`."""


class Worker:
    """Serves one engine on the bus.

    Args:
        config: names and addresses.
        engine: not started; `run` starts and closes it.
    """

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._subjects = Subjects(config.fleet)
        self._incarnation = uuid.uuid4().hex[:8]
        self._state = WorkerState.STARTING
        self._started_at = time.monotonic()
        self._last_error: str | None = None
        self._death: EngineDead | None = None
        self._nats: Connection
        self._streams: Streams
        # Set once the engine runs.
        self._requests: Subscription | None = None
        self._stopping = asyncio.Event()
        self._announce = asyncio.Event()
        self._to_send = asyncio.Event()
        self._to_abort: set[str] = set()
        self._abort_wanted = asyncio.Event()
        self._intake: asyncio.Queue[tuple[str, RequestMessage]] = asyncio.Queue(MAX_WAITING)
        self.bad_messages = 0
        """Requests without a usable id and link messages that did not decode: there was nobody to answer."""
        self.lost_frames = 0
        """Frames that could not be published."""
        self.duplicates = 0
        """Requests that were open here already and were not taken twice."""

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Worker {self._config.worker_id} {self._state} model={self._config.model}>"

    def stop(self) -> None:
        """Ask `run` to end: open requests fail with `worker_stopped`, then the engine is closed."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            BusBroken: no NATS server answers.
            EngineDead: the engine could not be started or died; every open request was told.
        """
        self._nats = await open_connection(
            self._config.nats_url,
            name=f"rollbus worker {self._config.worker_id}",
            on_disconnect=self._on_disconnect,
            on_reconnect=self._on_reconnect,
            on_error=self._on_error,
        )
        try:
            self._streams = Streams(
                self._incarnation, max_payload=self._nats.max_payload, weight_version=self._config.weight_version
            )
            await subscribe(self._nats, self._subjects.ping, self._on_ping)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._announce_presence(), name="worker.presence"),
                    tasks.create_task(self._run_engine(), name="worker.engine"),
                    tasks.create_task(self._admit_requests(), name="worker.admit"),
                    tasks.create_task(self._abort_requests(), name="worker.abort"),
                    tasks.create_task(self._send_frames(), name="worker.send"),
                ]
                await self._stopping.wait()
                for task in background:
                    task.cancel()
            await self._say_goodbye()
        finally:
            try:
                await self._engine.close()
            finally:
                await close_connection(self._nats)
        if self._death is not None:
            raise self._death
        if self._nats.lost is not None:
            raise self._nats.lost

    async def _run_engine(self) -> None:
        """Start the engine and turn its steps into chunks until it dies."""
        try:
            await self._engine.start()
            await subscribe(self._nats, self._subjects.links_to(self._config.worker_id), self._on_link_message)
            self._requests = await subscribe(
                self._nats, self._subjects.requests_for(self._config.model), self._on_request, queue="workers"
            )
            # The announcement follows the subscriptions on the same connection: who reads it is heard here.
            self._set_state(WorkerState.SERVING)
            async for steps in self._engine.steps():
                self._abort(self._streams.take(steps))
                self._to_send.set()
            raise EngineDead("the engine stopped by itself")
        except EngineDead as exc:
            logger.error("engine.dead worker=%s error=%s", self._config.worker_id, exc)
            self._death = exc
            self._last_error = str(exc)
            self._stopping.set()

    async def _on_request(self, message: Msg) -> None:
        try:
            envelope = decode_request_message(message.data)
            client = message.subject.split(".")[-3]
            if envelope.client != client:
                raise RemoteProtocolError(f"client {client} signed as {envelope.client}")
        except RemoteProtocolError as exc:
            self._count_bad(message, exc)
            return
        waiting = self._intake.qsize() + len(self._streams) - self._engine.capabilities.max_num_seqs
        if waiting >= MAX_WAITING or self._intake.full():
            self._reject(
                envelope,
                RequestRejected(code=ErrorCode.QUEUE_FULL, message=f"{MAX_WAITING} requests wait at this worker"),
            )
            return
        self._intake.put_nowait((client, envelope))

    async def _admit_requests(self) -> None:
        while True:
            client, envelope = await self._intake.get()
            try:
                await self._admit(client, envelope)
            except RequestError as exc:
                self._reject(envelope, exc)
            except EngineDead as exc:
                # The engine's own task hears of it too and ends this worker; what is open fails there.
                logger.warning("request.not_admitted error=%s", exc)
            self._to_send.set()

    async def _admit(self, client: str, envelope: RequestMessage) -> None:
        try:
            request = decode_request(envelope.request)
        except RemoteProtocolError as exc:
            raise RequestRejected(code=ErrorCode.INVALID_REQUEST, message=str(exc)) from exc
        key = RequestKey(request.request_id, envelope.attempt, envelope.child)
        if engine_key(client, key) in self._streams:
            self.duplicates += 1
            return
        check_request(request, self._engine.capabilities, self._config.weight_version)
        name = self._streams.admit(client, key, request, self._engine.capabilities)
        self._to_send.set()
        try:
            await self._engine.add(name, request)
            if name not in self._streams:
                # Given up while the engine took it on, and an abort was ignored: the engine did not know it yet.
                self._abort([name])
        except RequestError as exc:
            self._fail(name, exc)
        except EngineDead:
            raise
        except Exception as exc:
            # The boundary of one request: whatever an engine trips over, the other requests go on.
            logger.exception("request.failed key=%s", name)
            self._fail(name, RequestError(code=ErrorCode.ENGINE_ERROR, message=f"{type(exc).__name__}: {exc}"))

    def _fail(self, name: str, error: RequestError) -> None:
        if name in self._streams:
            self._streams.fail(name, error)
            self._to_send.set()

    def _reject(self, envelope: RequestMessage, error: RequestError) -> None:
        request_id = request_id_of(envelope.request)
        if request_id is None:
            self.bad_messages += 1
            logger.warning("request.bad client=%s error=%s", envelope.client, error)
            return
        self._streams.reject(envelope.client, RequestKey(request_id, envelope.attempt, envelope.child), error)
        self._to_send.set()

    async def _on_link_message(self, message: Msg) -> None:
        try:
            link_message = decode_link_message(message.data)
        except RemoteProtocolError as exc:
            self._count_bad(message, exc)
            return
        self._abort(self._streams.open_names(message.subject.split(".")[-2], link_message.abort))

    def _abort(self, names: list[str]) -> None:
        self._to_abort.update(names)
        if names:
            self._abort_wanted.set()

    async def _abort_requests(self) -> None:
        while True:
            await self._abort_wanted.wait()
            self._abort_wanted.clear()
            names, self._to_abort = self._to_abort, set()
            await self._engine.abort(sorted(names))

    async def _send_frames(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            await self._flush_frames()

    async def _flush_frames(self) -> None:
        for client, frame in self._streams.seal():
            try:
                await publish(self._nats, self._subjects.frame(client, self._config.worker_id), frame)
            except BusBroken as exc:
                # The link's numbers, or the new incarnation after a reconnect, tell the client.
                self.lost_frames += 1
                logger.warning("frame.lost client=%s error=%s", client, exc)

    async def _on_ping(self, _message: Msg) -> None:
        self._announce.set()

    def _set_state(self, state: WorkerState) -> None:
        logger.info("worker.%s worker=%s model=%s", state, self._config.worker_id, self._config.model)
        self._state = state
        self._announce.set()

    def presence(self) -> WorkerPresence:
        """What this worker says of itself now."""
        serving = self._state is WorkerState.SERVING
        capabilities = self._engine.capabilities if serving else None
        in_flight = len(self._streams)
        return WorkerPresence(
            worker=self._config.worker_id,
            incarnation=self._incarnation,
            model=self._config.model,
            state=self._state,
            weight_version=self._config.weight_version,
            in_flight=in_flight,
            free_slots=max(capabilities.max_num_seqs - in_flight, 0) if capabilities else 0,
            uptime_s=round(time.monotonic() - self._started_at, 3),
            lease_s=LEASE_S,
            capabilities=capabilities,
            last_error=self._last_error,
            model_path=self._config.model_path,
        )

    async def _announce_presence(self) -> None:
        while True:
            # Buffered while the connection is down, an announcement would renew a lease that has run out.
            if self._nats.is_connected:
                await self._publish_presence()
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._announce.wait()
            except TimeoutError:
                continue
            self._announce.clear()

    async def _publish_presence(self) -> None:
        try:
            await publish(self._nats, self._subjects.presence(self._config.worker_id), encode_json(self.presence()))
        except BusBroken as exc:
            logger.warning("presence.lost error=%s", exc)

    async def _say_goodbye(self) -> None:
        """End what is open, tell everyone, and see the last bytes off."""
        code, reason = ErrorCode.WORKER_STOPPED, "the worker was stopped"
        if self._death is not None:
            code, reason = ErrorCode.ENGINE_DEAD, f"the engine died: {self._death}"
        # From here on requests go to other workers: closing the engine takes time, and nobody would answer them here.
        if self._requests is not None:
            await drain(self._nats, self._requests)
        while not self._intake.empty():
            _, envelope = self._intake.get_nowait()
            # Not of the engine's death, even where it died: what it never saw did not kill it.
            self._reject(envelope, RequestError(code=ErrorCode.WORKER_STOPPED, message=reason))
        self._streams.fail_all(code, reason)
        await self._flush_frames()
        self._set_state(WorkerState.STOPPED if self._death is None else WorkerState.FAILED)
        await self._publish_presence()

    async def _on_disconnect(self) -> None:
        """What was on its way may be lost: end this life, so that clients wait for nothing, and begin another."""
        self._incarnation = uuid.uuid4().hex[:8]
        self._abort(self._streams.restart(self._incarnation))

    async def _on_reconnect(self) -> None:
        self._announce.set()

    def _on_error(self, error: Exception) -> None:
        """Stop when the server has ended the connection for good; the rest is counted by the connection."""
        if isinstance(error, BusBroken):
            self._last_error = str(error)
            self._stopping.set()

    def _count_bad(self, message: Msg, error: RemoteProtocolError) -> None:
        self.bad_messages += 1
        logger.warning("message.bad subject=%s error=%s", message.subject, error)
