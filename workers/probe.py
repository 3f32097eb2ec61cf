"""The HTTP probe of a worker, for supervisors: liveness, readiness and metrics, and the drain over its Unix socket.

The server is minimal, because untrusted programs may reach it. It accepts one request without a body per connection,
and its responses contain nothing secret. It runs on the worker's event loop, so a worker whose loop hangs does not
answer.
"""

import argparse
import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, NamedTuple, Self
from urllib.parse import parse_qs

from ..bus.worker_metrics import exposition
from ..schemas.errors import InvalidRequest, RollbusError
from ..schemas.options import MAX_DRAIN_S, duration
from ..schemas.presence import WorkerPresence, WorkerState

MAX_HEAD_BYTES: Final = 8192
"""Maximum bytes of a request head. Probes send a few hundred."""
MAX_CONNECTIONS: Final = 16
"""Maximum open connections. A further connection closes the oldest. Each probe and each scraper needs one."""
TIMEOUT_S: Final = 5.0
"""Seconds for a request and its response together."""
MAX_PORT: Final = 65535


class _ProbeAnswer(NamedTuple):
    status: HTTPStatus
    body: str
    content_type: str = "application/json"
    headers: str = ""


def listen(address: str) -> socket.socket:
    """Listen at `HOST:PORT`. Call this before the worker starts anything else, so that an error is reported first.

    Raises:
        InvalidRequest: `address` is not `HOST:PORT`.
        RollbusError: the address is in use, or does not belong to this machine.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise InvalidRequest("--probe", f"is {address!r}", "HOST:PORT, such as 127.0.0.1:8081")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=MAX_CONNECTIONS)
    except OSError as exc:
        # The text of `socket` repeats the address. An unknown host has no errno.
        reason = str(exc) if exc.errno is None or exc.errno < 0 else os.strerror(exc.errno)
        raise RollbusError(f"cannot listen at --probe {address}: {reason}") from exc


class ProbeServer:
    """Answers probes on a listening socket inside `async with`.

    Args:
        describe: returns the worker's current presence, or None while the worker has no connection to NATS.
        drain: drains the worker at `POST /drain`, and returns True if it holds no request within so many seconds; None
            for the worker's own limit. Without `drain`, there is no such route.
    """

    def __init__(
        self,
        on: socket.socket,
        describe: Callable[[], WorkerPresence | None],
        drain: Callable[[float | None], Awaitable[bool]] | None = None,
    ) -> None:
        self._socket = on
        self._describe = describe
        self._drain = drain
        # One task per connection, the oldest first.
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        port: int = self._socket.getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        """Start to answer."""
        start = asyncio.start_unix_server if self._socket.family == socket.AF_UNIX else asyncio.start_server
        self._server = await start(self._handle, sock=self._socket, limit=MAX_HEAD_BYTES)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop listening, and close open connections."""
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
            # Close the oldest connection, not the new one: otherwise idle connections could block health checks.
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        self._tasks[task] = None
        try:
            async with asyncio.timeout(TIMEOUT_S) as limit:
                writer.write(_encode(await self._answer_of(reader, limit)))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            # The peer disconnected, or is too slow.
            pass
        finally:
            writer.transport.abort()
            self._tasks.pop(task, None)

    async def _answer_of(self, reader: asyncio.StreamReader, limit: asyncio.Timeout) -> _ProbeAnswer:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"allowed: {MAX_HEAD_BYTES} bytes")
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = rest.partition(" ")
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            return _refusal(HTTPStatus.BAD_REQUEST, "allowed: HTTP/1.1")
        path, _, query = target.partition("?")
        if self._drain is not None and path == "/drain":
            if method != "POST":
                return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "allowed: POST")._replace(headers="Allow: POST\r\n")
            # A drain has a limit of its own.
            limit.reschedule(None)
            answer = await self._answer_drain(query, self._drain)
            limit.reschedule(asyncio.get_running_loop().time() + TIMEOUT_S)
            return answer
        if method != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "allowed: GET")._replace(headers="Allow: GET\r\n")
        return self._answer(path)

    async def _answer_drain(self, query: str, drain: Callable[[float | None], Awaitable[bool]]) -> _ProbeAnswer:
        try:
            given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
            limit_s = duration(given.pop("timeout_s")[-1]) if "timeout_s" in given else None
        except (ValueError, argparse.ArgumentTypeError):
            limit_s, given = None, {"timeout_s": []}
        if given or (limit_s is not None and limit_s > MAX_DRAIN_S):
            allowed = f"allowed: timeout_s=TIME, above 0 and at most {MAX_DRAIN_S:g} seconds"
            return _refusal(HTTPStatus.BAD_REQUEST, allowed)
        is_drained = await drain(limit_s)
        return self._answer("/drain")._replace(status=HTTPStatus.OK if is_drained else HTTPStatus.GATEWAY_TIMEOUT)

    def _answer(self, path: str) -> _ProbeAnswer:
        routes = ("/health", "/ready", "/metrics", *(["/drain"] if self._drain is not None else []))
        if path not in routes:
            return _refusal(HTTPStatus.NOT_FOUND, f"allowed: {', '.join(routes)}")
        presence = self._describe()
        if path == "/metrics":
            text = "" if presence is None else exposition([presence])
            return _ProbeAnswer(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")
        state = None if presence is None else presence.state
        is_met = state is not WorkerState.FAILED if path == "/health" else state is WorkerState.SERVING
        shown: dict[str, str | int] = {"state": "connecting" if state is None else str(state)}
        if path == "/drain":
            shown["in_flight"] = 0 if presence is None else presence.in_flight
        body = json.dumps(shown) + "\n"
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
