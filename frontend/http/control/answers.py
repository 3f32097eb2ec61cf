"""From what became of a command to an HTTP answer: the ledger as JSON, with the status that fits it.

Where a command was not applied by all, `error` stands in the ledger, in the shape of all other errors.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.responses import Response

from .... import bus
from ....schemas.errors import ControlCode
from ...ledger import ledger_as_json
from ..status import json_response

__all__ = [
    "LOAD_LORA_OF_VLLM",
    "LORA_OF_PRIME",
    "RL",
    "UNLOAD_LORA_OF_VLLM",
    "VLLM",
    "ResponseStyle",
    "ledger_response",
    "status_of",
]

NAMES: Final = {"label": "weight_version", "source": "path"}
"""What the routes call fields of commands, where they have names of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStyle:
    """How a family of routes answers."""

    is_vllm: bool = False
    """Its clients were written for vLLM's or prime-rl's servers: fields that are missing have the defaults of those."""
    partial: int = 207
    """Where some applied a command and some did not."""
    bad_source: int = 502
    """Where none could read what was to be loaded."""
    may_replace: bool = True
    """An adapter may have the name of one that is loaded, where the client does not say."""
    text: str | None = None
    """The whole answer, of a command that all have applied; None: the ledger as JSON."""


RL: Final = ResponseStyle()
"""Our own routes."""
VLLM: Final = ResponseStyle(is_vllm=True, partial=502)
"""Clients that were written for one engine take any 2xx for success: part of the workers is none."""
LORA_OF_PRIME: Final = replace(VLLM, bad_source=404)
"""As vLLM answers for an adapter that is not there; prime-rl tries again then, as a shared disk may be late."""
LOAD_LORA_OF_VLLM: Final = replace(LORA_OF_PRIME, may_replace=False, text="Success: LoRA adapter added successfully.")
UNLOAD_LORA_OF_VLLM: Final = replace(VLLM, text="Success: LoRA adapter removed successfully.")


def ledger_response(error: bus.CommandIncomplete, command: str, style: ResponseStyle = RL) -> Response:
    """The answer where not all have applied a command."""
    status, code = status_of(error.ledger, command, style)
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    why = {"message": str(error), "type": kind, "param": None, "code": code}
    body: dict[str, Any] = {**ledger_as_json(error.ledger), "complete": False, "error": why}
    return json_response(body, status)


def status_of(ledger: bus.CommandResult, command: str, style: ResponseStyle = RL) -> tuple[int, str]:
    """Status and code for the ledger of a command that not all have applied."""
    if ledger.applied and ledger.command == command and not ledger.has_found_nothing:
        return style.partial, "partial"
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
        return style.bad_source, ControlCode.BAD_SOURCE
    return 502, codes.pop() if len(codes) == 1 else "not_applied"
