"""The version of new weights: the client's number, or one more than the newest applied; and the text it came as."""

from collections.abc import Awaitable, Callable
from typing import Final

from .... import bus
from ....bus.protocol.fleet.desired import target_version
from ....schemas.errors import ControlCode, ControlError, ErrorCode
from ....schemas.limits import MAX_WEIGHT_VERSION
from ..errors import HttpError, invalid
from ..service import Service
from .reading import either

__all__ = ["version_and_label", "with_version"]

MAX_DIGITS: Final = len(str(MAX_WEIGHT_VERSION))
"""A longer number is a text like any other."""
MAX_TRIES: Final = 8
"""Of clients that give weights without versions at the same time, each must come after another."""

Update = Callable[[int], Awaitable[bus.CommandResult]]
"""Gives the weights to the fleet under a version."""


def version_and_label(version: int | None, text: str | None) -> tuple[int | None, str | None]:
    """Return the number that a client gives new weights, and the text that its number would not give back.

    Raises:
        HttpError: 400, both are numbers.
    """
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    number = int(text or 0) if is_number else None
    if number is not None and number > MAX_WEIGHT_VERSION:
        number = None
    given = either("version", version, "weight_version", number)
    return given, None if text is None or text == str(number) else text


async def with_version(service: Service, update: Update, version: int | None, model: str | None) -> bus.CommandResult:
    """Give weights to the fleet, under the next version where none is given.

    Raises:
        HttpError: 503, 400: nobody is there whose version could be followed.
        RollbusError: what `update` raises.
    """
    if version is not None:
        return await update(version)
    for _ in range(MAX_TRIES - 1):
        try:
            return await update(await _next_version(service, model))
        except ControlError as error:
            if error.code is not ControlCode.OLD_VERSION:
                raise
            # Another client was faster: these weights come after its.
    return await update(await _next_version(service, model))


async def _next_version(service: Service, model: str | None) -> int:
    state = await service.rb.fleet.state()
    models = {worker.model for worker in state.workers}
    if not models:
        raise HttpError(503, "no workers are there", code=ErrorCode.NO_WORKERS)
    if model is None and len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(sorted(models))}")
    if model is not None and model not in models:
        raise invalid("model", f"is {model!r}", f"one of {', '.join(sorted(models))}")
    workers = [worker for worker in state.workers if model in (None, worker.model)]
    desired = state.desired.get(workers[0].model)
    recorded = [target_version(desired, worker.worker) or 0 for worker in workers]
    return max(*(worker.weight_version for worker in workers), *recorded) + 1
