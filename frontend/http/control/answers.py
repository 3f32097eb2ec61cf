"""From what became of a command to an HTTP answer: the ledger as JSON, with the status that fits it.

Where a command was not applied by all, `error` stands in the ledger, in the shape of all other errors.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.responses import Response

import bus
from frontend.http.errors import HttpError, http_error
from frontend.http.status import json_response
from frontend.ledger import ledger_as_json
from schemas.errors import ControlCode, ErrorCode, InvalidRequest, LocalProtocolError

__all__ = ["LORA_OF_VLLM", "RL", "VLLM", "Manner", "answer", "ledger_response", "status_of"]

NAMES: Final = {"source": "path"}
"""What the routes call fields of commands, where they have names of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a family of routes answers."""

    is_vllm: bool = False
    """Its clients were written for vLLM's or prime-rl's servers: fields that are missing have the defaults of those."""
    partial: int = 207
    """Where some applied a command and some did not."""
    bad_source: int = 502
    """Where none could read what was to be loaded."""


RL: Final = Manner()
"""Our own routes."""
VLLM: Final = Manner(is_vllm=True, partial=502)
"""Clients that were written for one engine take any 2xx for success: part of the workers is none."""
LORA_OF_VLLM: Final = Manner(is_vllm=True, partial=502, bad_source=404)
"""As vLLM answers for an adapter that is not there; prime-rl tries again then, as a shared disk may be late."""

Words = Callable[[bus.Ledger], Mapping[str, object]]
"""What an answer says beside the ledger, of a command that all have applied."""


async def answer(
    work: Awaitable[bus.Ledger],
    command: str,
    manner: Manner = RL,
    *,
    words: Words = lambda _ledger: {},
    names: Mapping[str, str] | None = None,
) -> Response:
    """Wait for a command, and answer with its ledger.

    A client that leaves meanwhile changes nothing: the command goes on, for as long as its own time allows.

    Args:
        command: its name, to tell it from what is asked before it.
        names: what the route calls fields, where it has names of its own.

    Raises:
        HttpError: 400, a field is wrong; 413, there is more in it than one message may carry.
        RollbusError: what `bus.Fleet` raises, but for an incomplete command.
    """
    try:
        ledger = await work
    except bus.CommandIncomplete as error:
        return ledger_response(error, command, manner)
    except InvalidRequest as error:
        raise http_error(error, {**NAMES, **(names or {})}) from None
    except LocalProtocolError as error:
        # Of commands there is no other: one that NATS would not carry. No worker has heard of it.
        raise HttpError(413, str(error), code=ErrorCode.TOO_LARGE) from None
    return json_response({**words(ledger), **ledger_as_json(ledger)})


def ledger_response(error: bus.CommandIncomplete, command: str, manner: Manner = RL) -> Response:
    """The answer where not all have applied a command."""
    status, code = status_of(error.ledger, command, manner)
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    why = {"message": str(error), "type": kind, "param": None, "code": code}
    body: dict[str, Any] = {**ledger_as_json(error.ledger), "complete": False, "error": why}
    return json_response(body, status)


def status_of(ledger: bus.Ledger, command: str, manner: Manner = RL) -> tuple[int, str]:
    """Status and code for the ledger of a command that not all have applied."""
    if ledger.applied and ledger.command == command and not ledger.has_found_nothing:
        return manner.partial, "partial"
    if ledger.has_found_nothing and not (ledger.failed or ledger.unsupported or ledger.stale or ledger.missing):
        return 404, ControlCode.NOT_FOUND
    refused = [*ledger.failed.values(), *ledger.unsupported.values()]
    codes = {ControlCode.UNKNOWN if ack.error is None else ack.error.code for ack in refused}
    if ControlCode.PATH_REFUSED in codes:
        return 403, ControlCode.PATH_REFUSED
    if codes <= {ControlCode.STALE} and ledger.stale:
        return 409, ControlCode.STALE
    if codes <= {ControlCode.TIMEOUT}:
        return 504, ControlCode.TIMEOUT
    if codes == {ControlCode.OLD_VERSION}:
        return 409, ControlCode.OLD_VERSION
    if codes == {ControlCode.BAD_SOURCE}:
        return manner.bad_source, ControlCode.BAD_SOURCE
    return 502, codes.pop() if len(codes) == 1 else "not_applied"
