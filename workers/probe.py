"""What supervisors ask a worker over HTTP: is it alive, does it serve, and its metrics.

Small on purpose: a worker has no other HTTP server, and strangers may reach this one. It takes one GET without a body
on each connection, and nothing that it answers is secret. It runs on the worker's event loop, so that a worker whose
loop hangs does not answer.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Final, NamedTuple, Self

from ..bus.worker_metrics import exposition
from ..schemas.errors import InvalidRequest, RollbusError
from ..schemas.presence import WorkerPresence, WorkerState

__all__ = ["ProbeServer", "listen"]

MAX_HEAD_BYTES: Final = 8192
"""Of a request: what probes send has some hundred."""
MAX_CONNECTIONS: Final = 16
"""At a time; one more ends the oldest. Probes and a scraper need one each."""
TIMEOUT_S: Final = 5.0
"""For a request and its answer together."""
MAX_PORT: Final = 65535


class _ProbeAnswer(NamedTuple):
    status: HTTPStatus
    body: str
    content_type: str = "application/json"
    headers: str = ""


def listen(address: str) -> socket.socket:
    """Listen at `HOST:PORT`; called before anything else is started, so that an error comes first.

    Raises:
        InvalidRequest: it is no address.
        RollbusError: the address is in use, or not of this machine.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise InvalidRequest(field="--probe", problem=f"is {address!r}", allowed="HOST:PORT, such as 127.0.0.1:8081")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=MAX_CONNECTIONS)
    except OSError as exc:
        # The text of socket repeats the address; an unknown host has no number of the system's.
        reason = str(exc) if exc.errno is None or exc.errno < 0 else os.strerror(exc.errno)
        raise RollbusError(f"cannot listen at --probe {address}: {reason}") from exc


class ProbeServer:
    """Answers on a listening socket inside `async with`.

    Args:
        describe: the worker's presence now; None while it has no connection to NATS.
    """

    def __init__(self, on: socket.socket, describe: Callable[[], WorkerPresence | None]) -> None:
        self._socket = on
        self._describe = describe
        # One for each connection, the oldest first.
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._socket.getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        """Begin to answer."""
        self._server = await asyncio.start_server(self._handle, sock=self._socket, limit=MAX_HEAD_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to listen, and cut off what is being answered."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not called in a task")
        if len(self._tasks) >= MAX_CONNECTIONS:
            # Not the new one: a stranger with idle connections would keep health checks out.
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        self._tasks[task] = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                writer.write(_encode(await self._answer_of(reader)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            # It went away, or is too slow.
            pass
        finally:
            writer.transport.abort()
            self._tasks.pop(task, None)

    async def _answer_of(self, reader: asyncio.StreamReader) -> _ProbeAnswer:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"allowed: {MAX_HEAD_BYTES} bytes")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.partition(" ")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            return _refusal(HTTPStatus.BAD_REQUEST, "allowed: HTTP/1.1")
        if method != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "allowed: GET")._replace(headers="Allow: GET\r\n")
        return self._answer(target.partition("?")[0])

    def _answer(self, path: str) -> _ProbeAnswer:
        if path not in ("/health", "/ready", "/metrics"):
            return _refusal(HTTPStatus.NOT_FOUND, "allowed: /health, /ready, /metrics")
        presence = self._describe()
        if path == "/metrics":
            text = "" if presence is None else exposition([presence])
            return _ProbeAnswer(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")
        state = None if presence is None else presence.state
        is_met = state is not WorkerState.FAILED if path == "/health" else state is WorkerState.SERVING
        body = json.dumps({"state": "connecting" if state is None else str(state)}) + "\n"
        return _ProbeAnswer(HTTPStatus.OK if is_met else HTTPStatus.SERVICE_UNAVAILABLE, body)


def _refusal(status: HTTPStatus, allowed: str) -> _ProbeAnswer:
    return _ProbeAnswer(status, json.dumps({"error": f"{status.phrase}; {allowed}"}) + "\n")


def _encode(answer: _ProbeAnswer) -> bytes:
    body = answer.body.encode()
    head = (
        f"HTTP/1.1 {answer.status} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{answer.headers}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
