"""Viewers of a service's event stream, like the page."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.http.support import Http
from tests.support.waits import SOON_S

PATH = "/v1/rl/events"


@dataclass
class Stream:
    """The events that one viewer receives."""

    lines: AsyncIterator[str]
    hello: dict[str, Any] = field(default_factory=dict)

    async def next(self, name: str) -> dict[str, Any]:
        """Return the next event of a name, and skip others.

        Raises:
            EOFError: the stream has ended.
        """
        async with asyncio.timeout(SOON_S):
            while (line := await anext(self.lines, None)) is not None:
                if line == f"event: {name}":
                    return json.loads((await anext(self.lines)).removeprefix("data: "))  # type: ignore[no-any-return]
        raise EOFError

    async def until(self, name: str, holds: Any) -> dict[str, Any]:
        """Return the first event of a name for which `holds` is true."""
        while not holds(event := await self.next(name)):
            pass
        return event

    def workers(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the rows of a `fleet` event, with the names of their fields."""
        return [dict(zip(self.hello["worker_fields"], row, strict=True)) for row in event["workers"]]


@contextlib.asynccontextmanager
async def watching(http: Http, query: str = "", token: str | None = None) -> AsyncIterator[Stream]:
    """Watch the events until the block ends. The first event has arrived at the start of the block."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        httpx.AsyncClient(base_url=http.url, timeout=SOON_S, verify=False) as client,
        client.stream("GET", f"{PATH}{query}", headers=headers) as answer,
    ):
        assert answer.status_code == 200, (await answer.aread(), answer.status_code)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream = Stream(answer.aiter_lines())
        stream.hello = await stream.next("hello")
        yield stream
