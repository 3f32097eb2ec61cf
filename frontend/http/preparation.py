"""HTTP requests whose token requests are not open yet, and the answer to those that are aborted meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from ...schemas.request_ids import wire_id
from .calls import EventStream, JsonPieces
from .edge import REQUEST_ID_HEADER

__all__ = ["Preparation", "RequestAborted", "aborted_response"]


class RequestAborted(Exception):
    """A request was aborted before its token requests were open.

    Attributes:
        request_id: the id that its client chose, or a new one.
        model: the requested model; empty if it is unknown.
    """

    def __init__(self, request_id: str, models: Sequence[str]) -> None:
        self.request_id = request_id
        self.model = models[0] if models else ""
        super().__init__("the request was aborted")


@dataclass(eq=False, slots=True)
class Preparation:
    """One HTTP request from the time at which its body was read until its token requests are open."""

    request_id: str
    id_scope: str | None
    """The user, if the user's client chose the id."""
    scope: asyncio.Timeout | None
    """Ends the preparation. None: it has ended, and the token requests are open in a moment."""
    models: Sequence[str] = ()
    """The models that may serve it. Empty while they are unknown."""
    is_aborted: bool = False

    @property
    def wire_id(self) -> str:
        """Id of the request on the wire."""
        return wire_id(self.request_id, self.id_scope)

    def may_be_for(self, model: str | None) -> bool:
        """Return True if the request may be for `model`, or if that is None."""
        return model is None or not self.models or model in self.models

    def abort(self, model: str | None) -> bool:
        """End the preparation if the request is for `model`, or if that is None. Return True if it ends."""
        if self.scope is None or not (model is None or model in self.models):
            return False
        if not self.is_aborted:
            self.is_aborted = True
            self.scope.reschedule(0.0)
        return True


def aborted_response(error: RequestAborted, documents: Sequence[object], *, stream: bool) -> Response:
    """Return the answer to an aborted request: the only document, or a stream of documents."""
    headers = {REQUEST_ID_HEADER: error.request_id if error.request_id.isascii() else ""}
    first, *others = map(msgspec.json.encode, documents)
    return EventStream(first, _events(others), headers) if stream else JsonPieces([first], headers)


async def _events(events: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
    for event in events:
        yield event
