"""The version of new weights: the client's number or one more than the newest version, and the client's label."""

from collections.abc import Awaitable, Callable
from typing import Final

from .... import bus
from ....bus.protocol.fleet.desired import served_version
from ....schemas.errors import ControlCode, ControlError, ErrorCode
from ....schemas.limits import MAX_WEIGHT_VERSION
from ..errors import HttpError, invalid
from ..service import Service
from .reading import either

__all__ = ["version_and_label", "with_version"]

MAX_DIGITS: Final = len(str(MAX_WEIGHT_VERSION))
"""Digits of the largest version. A longer number is a label."""
MAX_TRIES: Final = 8
"""Attempts to use the next version. Clients that update at the same time without a version may choose the same number,
so all but one of them must try again."""

Update = Callable[[int], Awaitable[bus.CommandResult]]
"""Sends the weights to the fleet under a version."""


def version_and_label(version: int | None, text: str | None) -> tuple[int | None, str | None]:
    """Return the client's number for new weights, and the label; None for each that is missing.

    A text becomes the label unless it is exactly the decimal form of its number: `007` is version 7 with label `007`.

    Raises:
        HttpError: 400, `version` and `weight_version` both give a number.
    """
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    number = int(text or 0) if is_number else None
    if number is not None and number > MAX_WEIGHT_VERSION:
        number = None
    given = either("version", version, "weight_version", number)
    return given, None if text is None or text == str(number) else text


async def with_version(service: Service, update: Update, version: int | None, model: str | None) -> bus.CommandResult:
    """Send weights to the fleet under `version`; if it is None, under the next version.

    Raises:
        HttpError: the next version cannot be computed: 503 if the fleet has no workers, 400 if the model is unknown, or
            missing although the fleet has several models.
        RollbusError: any error of `update`.
    """
    if version is not None:
        return await update(version)
    for _ in range(MAX_TRIES - 1):
        try:
            return await update(await _next_version(service, model))
        except ControlError as error:
            if error.code is not ControlCode.OLD_VERSION:
                raise
            # Another client has used this version. Try the version after it.
    return await update(await _next_version(service, model))


async def _next_version(service: Service, model: str | None) -> int:
    state = await service.rb.fleet.state()
    models = {worker.model for worker in state.workers}
    if not models:
        raise HttpError(503, "the fleet has no workers", code=ErrorCode.NO_WORKERS)
    if model is None and len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(sorted(models))}")
    if model is not None and model not in models:
        raise invalid("model", f"is {model!r}", f"one of {', '.join(sorted(models))}")
    workers = [worker for worker in state.workers if model in (None, worker.model)]
    desired = state.desired.get(workers[0].model)
    recorded = [served_version(desired, worker.worker) or 0 for worker in workers]
    return max(*(worker.served_version for worker in workers), *recorded) + 1
