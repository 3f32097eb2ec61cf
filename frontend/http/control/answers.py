"""HTTP answers for command results: the command result as JSON, with the matching HTTP status.

If not all workers applied the command, the answer also has `error`, in the format of all other errors.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

from starlette.responses import Response

from .... import bus
from ....schemas.decoding import JsonObject
from ....schemas.errors import ControlCode
from ...command_json import result_as_json
from ..calls import json_response
from ..errors import error_json

NAMES: Final = {"label": "weight_version", "source": "path"}
"""The routes' names for fields of commands, where the names differ."""


CALLERS_FAULTS: Final = frozenset(
    {ControlCode.INVALID_COMMAND, ControlCode.BAD_SOURCE, ControlCode.UNSUPPORTED, ControlCode.IS_ADAPTER}
)
"""Reasons of workers that the same command would get again."""
CONFLICTS: Final = frozenset(
    {
        ControlCode.OLD_VERSION,
        ControlCode.TRANSFER_HELD,
        ControlCode.TRANSFER_EXPIRED,
        ControlCode.TRANSFER_EMPTY,
        ControlCode.NOT_SERVING,
    }
)
"""Errors of all workers that answer 409."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseStyle:
    """The format of the answers of a family of routes."""

    is_vllm: bool = False
    """True if the clients were written for the servers of vLLM or prime-rl: missing fields get those defaults."""
    partial: int = 207
    """Status if only some workers applied a command."""
    bad_source: int = 400
    """Status if no worker can use the source of the weights or the adapter. prime-rl's client ignores 404 for weights.
    """
    may_replace: bool = True
    """True if an adapter may replace a loaded adapter of the same name when the client does not set `load_inplace`."""
    text: str | None = None
    """The whole answer to a command that all workers applied; None: the command result as JSON."""


RL: Final = ResponseStyle()
"""rollbus's own routes."""
VLLM: Final = ResponseStyle(is_vllm=True, partial=502)
"""vLLM's routes. Clients that were written for one engine treat any 2xx as success. If only some workers applied the
command, the status is therefore 502."""
LORA_OF_PRIME: Final = replace(VLLM, bad_source=404)
"""vLLM answers 404 for an adapter that does not exist. prime-rl retries after a 404, because files on a shared disk may
appear late."""
LOAD_LORA_OF_VLLM: Final = replace(LORA_OF_PRIME, may_replace=False, text="Success: LoRA adapter added successfully.")
UNLOAD_LORA_OF_VLLM: Final = replace(VLLM, text="Success: LoRA adapter removed successfully.")


def is_done_by_the_living(error: bus.CommandIncomplete, living: Set[str]) -> bool:
    """Return True if a recorded command was applied, except by workers that died meanwhile.

    A later start applies it first. Of commands that are not recorded, this is not true: requests of a dead worker go on
    at others, so their abort is not done.
    """
    result = error.ledger
    refused = result.failed or result.unsupported or result.stale or result.late
    is_applied = error.check_of is None and bool(result.applied and result.epochs) and not refused
    return is_applied and living.isdisjoint(result.missing)


def result_response(error: bus.CommandIncomplete, command: str, style: ResponseStyle = RL) -> Response:
    """Return the answer to a command that not all workers applied."""
    status, code = status_of(error.ledger, command, style)
    why = error_json(status, str(error), code)
    body: JsonObject = {**result_as_json(error.ledger), "complete": False, "error": why}
    return json_response(body, status)


def status_of(result: bus.CommandResult, command: str, style: ResponseStyle = RL) -> tuple[int, str]:
    """Return the HTTP status and the error code for the result of a command that not all workers applied.

    Args:
        command: the requested command. The result may be that of another command, for example of its check.
    """
    if result.applied and result.command == command and not result.has_found_nothing:
        return style.partial, "partial"
    if result.has_found_nothing and not (result.failed or result.unsupported or result.stale or result.missing):
        return 404, ControlCode.NOT_FOUND
    refused = [*result.failed.values(), *result.unsupported.values()]
    codes = {ControlCode.UNKNOWN if ack.error is None else ack.error.code for ack in refused}
    if ControlCode.PATH_REFUSED in codes:
        return 403, ControlCode.PATH_REFUSED
    if codes <= {ControlCode.STALE} and result.stale:
        return 409, ControlCode.STALE
    if codes <= {ControlCode.TIMEOUT}:
        return 504, ControlCode.TIMEOUT
    if len(codes) == 1 and codes <= CONFLICTS:
        return 409, codes.pop()
    if codes <= CALLERS_FAULTS:
        return style.bad_source if ControlCode.BAD_SOURCE in codes else 400, min(codes)
    return 502, codes.pop() if len(codes) == 1 else "not_applied"
