"""What became of a request, as the command line and the HTTP service answer it."""

import msgspec

from .. import bus
from ..bus.protocol.telemetry.request_trace import clock_skews
from ..schemas.control import READ_TIMEOUT_S

__all__ = ["RequestAnswer", "answer_of", "find_timelines", "unknown_request", "without_prefix"]

MAX_NAMED = 8
"""Silent workers that a message names."""


class RequestAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers tell of a request."""

    request_id: str
    """As its client named it."""
    timelines: tuple[bus.WorkerTimeline, ...]
    """One for each attempt of each sample at each worker, in the order of attempts."""
    workers_asked: int
    """Live workers."""
    workers_answered: int
    """Of these, those that did in time."""
    silent: tuple[str, ...]
    """The others, by id: what they had to do with the request is not known."""
    left_out: int
    """Earlier timelines, for which the answers had no room."""
    clock_skews: dict[str, float]
    """By worker, where its times show it: by how many seconds its clock is at least ahead of the server's; below 0:
    behind it."""


def answer_of(trace: bus.RequestTrace) -> RequestAnswer:
    """Return what is told of a trace."""
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
    """Say for people that no worker knows a request, and how long workers remember."""
    text = (
        f"request {trace.request_id!r} is unknown to {trace.workers_answered} of {trace.workers_asked} workers; each "
        "remembers its requests in flight and the last 1,000 that ended, until it is stopped"
    )
    if trace.silent:
        names = list(trace.silent)
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        text += f". No answer came from {', '.join(names[:MAX_NAMED])}{more}"
    return text


def without_prefix(request_id: str) -> str:
    """Return an id without `chatcmpl-` or `cmpl-`, which OpenAI's routes put before the id in their answers."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


async def find_timelines(
    fleet: bus.Fleet, request_id: str, *, model: str | None = None, timeout_s: float = READ_TIMEOUT_S
) -> bus.RequestTrace:
    """Ask what became of a request, by its id as it is or, if no worker knows that, without its prefix.

    Raises:
        RollbusError: as `Fleet.timelines`.
    """
    trace = await fleet.timelines(request_id, model=model, timeout_s=timeout_s)
    bare = without_prefix(request_id)
    if trace.timelines or bare in ("", request_id):
        return trace
    return await fleet.timelines(bare, model=model, timeout_s=timeout_s)
