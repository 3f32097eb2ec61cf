"""What the command line prints as JSON and the HTTP service answers: results of commands, and histories of requests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from .. import bus
from ..bus.protocol.fleet.command_result import RESULTS, CommandResult
from ..bus.protocol.telemetry.requests import clock_skews
from ..schemas.acks import Ack
from ..schemas.checks import list_names
from ..schemas.control import READ_TIMEOUT_S
from ..schemas.decoding import JsonObject
from ..schemas.telemetry import RequestKind


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker of a command result."""

    worker: str
    result: str
    ack: Ack | None
    """The worker's last ack; None if no ack arrived."""
    why: str | None
    """The reason why the worker did not apply the command, as text for people; None if it applied the command."""


def result_as_json(result: CommandResult) -> JsonObject:
    """Return the command result as JSON for programs.

    docs/operate/commands.md documents the names. They never change.
    """
    return {
        "command": result.command,
        "id": result.id,
        "complete": result.is_complete,
        "epochs": result.epochs,
        "seconds": round(result.seconds, 3),
        "workers": [_line_as_json(line) for line in result_lines(result)],
        "not_found": list(result.not_found),
        "not_awaited": list(result.not_awaited),
        "paused_s": None if result.paused_s is None else round(result.paused_s, 3),
        "warnings": list(result.warnings),
    }


ACK_FIELDS = ("model", "weight_version", "in_flight", "seconds", "stage", "canary", "request_ids", "verified", "timing")


def _line_as_json(line: WorkerLine) -> JsonObject:
    ack = line.ack
    code = None if ack is None or ack.error is None else ack.error.code
    found: JsonObject = {"worker": line.worker, "result": line.result, "code": code, "why": line.why}
    if ack is None:
        return found | dict.fromkeys(ACK_FIELDS)
    found |= {name: getattr(ack, name) for name in ACK_FIELDS}
    # The verification and the times include the zeros and empty lists that the wire format omits.
    for name in ("verified", "timing"):
        found[name] = None if found[name] is None else msgspec.structs.asdict(found[name])
    return found | {"seconds": round(ack.seconds, 3), "canary": msgspec.to_builtins(ack.canary)}


def result_lines(result: CommandResult) -> Iterator[WorkerLine]:
    """Yield each worker of a command result once. Workers that applied the command come first."""
    for column in RESULTS[:-1]:
        acks: Mapping[str, Ack] = getattr(result, column)
        for worker, ack in sorted(acks.items()):
            yield WorkerLine(worker, column, ack, _why(column, ack))
    for worker, why in sorted(result.missing.items()):
        yield WorkerLine(worker, "missing", None, why)


def _why(result: str, ack: Ack) -> str | None:
    if ack.error is not None:
        return ack.error.message
    if result == "late":
        return f"still in progress at the timeout: {ack.stage or ack.status}"
    return None


MAX_NAMED = 8
"""Largest number of silent workers that a message names."""


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The timelines that the workers recorded for a request."""

    request_id: str
    """The request id that the client chose."""
    timelines: tuple[bus.WorkerTimeline, ...]
    """One timeline for each attempt of each sample on each worker, in the order of the attempts."""
    workers_asked: int
    """Number of live workers."""
    workers_answered: int
    """Number of live workers that answered within the timeout."""
    silent: tuple[str, ...]
    """Ids of the live workers that did not answer. Their part in the request is unknown."""
    left_out: int
    """Number of earlier timelines that did not fit into the answers."""
    clock_skews: dict[str, float]
    """By worker: the number of seconds by which its clock is at least ahead of the server's clock. A negative value
    means behind. A worker is missing if its times do not show a difference.
    """


class RequestQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of requests, and its filters."""

    show: RequestKind = "running"
    """The list, as in `rollbus.Fleet.requests`."""
    client: str | None = None
    """Name of a client; None: requests of all clients."""
    model: str | None = None
    """Name of a model; None: requests for all models."""
    workers: list[str] | None = None
    """Ids of workers; None: requests at all workers."""
    limit: int = 50
    """Maximum number of requests, 1 to 256."""

    async def read(self, fleet: bus.Fleet) -> bus.RequestList:
        """Ask the workers for the list. Errors are those of `Fleet.requests`."""
        return await fleet.requests(**msgspec.structs.asdict(self))


def answer_of(trace: bus.RequestTrace) -> RequestAnswer:
    """Return a trace in the form that the command line and HTTP answer."""
    return RequestAnswer(
        request_id=trace.request_id,
        timelines=trace.timelines,
        workers_asked=trace.workers_asked,
        workers_answered=trace.workers_answered,
        silent=tuple(trace.silent),
        left_out=trace.left_out,
        clock_skews={worker: round(seconds, 6) for worker, seconds in clock_skews(trace.timelines).items()},
    )


def unknown_request(trace: bus.RequestTrace) -> str:
    """Return the text for people that no worker knows a request, with the number of requests that workers remember."""
    text = (
        f"request {trace.request_id!r} is unknown to {trace.workers_answered} of {trace.workers_asked} workers; each "
        "worker remembers its open requests and the last 1,000 that ended, until the worker exits"
    )
    if trace.silent:
        text += f". No answer from {list_names(list(trace.silent), limit=MAX_NAMED)}"
    return text


def without_prefix(request_id: str) -> str:
    """Return an id without the prefix `chatcmpl-` or `cmpl-`, which OpenAI's routes add to the id in their answers."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


async def find_timelines(
    fleet: bus.Fleet, request_id: str, *, model: str | None = None, timeout_s: float = READ_TIMEOUT_S
) -> bus.RequestTrace:
    """Ask the workers for the history of a request by its id. If no worker knows the id, ask again without its prefix.

    Raises:
        RollbusError: as `Fleet.timelines`.
    """
    trace = await fleet.timelines(request_id, model=model, timeout_s=timeout_s)
    bare = without_prefix(request_id)
    if trace.timelines or bare in ("", request_id):
        return trace
    return await fleet.timelines(bare, model=model, timeout_s=timeout_s)
