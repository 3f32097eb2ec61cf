"""Request ids as people have them: the id of an answer of OpenAI's routes has a prefix before the request's own."""

from .. import bus
from ..schemas.control import READ_TIMEOUT_S

__all__ = ["find_timelines", "without_prefix"]


def without_prefix(request_id: str) -> str:
    """Return an id without `chatcmpl-` or `cmpl-`."""
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
