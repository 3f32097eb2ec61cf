"""vLLM's own transfer of weights: what its routes take is passed on to the engines of all workers of a model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.control.answers import VLLM, answer
from frontend.http.control.bodies import FinishTransferBody, InitTransferBody, StartTransferBody
from frontend.http.control.reading import either, read_fields, send_options
from frontend.http.control.versions import with_version
from frontend.http.errors import invalid
from frontend.http.service import Service
from schemas.control import LOAD_TIMEOUT_S
from schemas.limits import MAX_WEIGHT_VERSION

__all__ = ["finish_weight_update", "init_weight_transfer_engine", "start_weight_update"]


async def init_weight_transfer_engine(service: Service, request: Request) -> Response:
    """Set up the engines' transfer of weights."""
    fields = await read_fields(service, request, InitTransferBody)
    options: dict[str, Any] = {"timeout_s": LOAD_TIMEOUT_S, **send_options(fields)}
    work = service.rb.fleet.init_weight_transfer(fields.init_info, **options)
    words = {"message": "Weight transfer initialized"}
    names = {"info": "init_info"}
    return await answer(work, "init_weight_transfer", VLLM, words=lambda _ledger: words, names=names)


async def start_weight_update(service: Service, request: Request) -> Response:
    """Hold the requests in flight, and begin to take weights."""
    fields = await read_fields(service, request, StartTransferBody)
    options: dict[str, Any] = send_options(fields)
    work = service.rb.fleet.start_weight_update(mode=fields.mode, **options)
    words = {"message": "Weight update started"}
    return await answer(work, "start_weight_update", VLLM, words=lambda _ledger: words)


async def finish_weight_update(service: Service, request: Request) -> Response:
    """Use the weights that came, under a version: the client's, or the next."""
    fields = await read_fields(service, request, FinishTransferBody)
    version = either("version", fields.version, "weight_version", _version(fields.weight_version))
    options: dict[str, Any] = send_options(fields)

    async def finish(version: int) -> bus.Ledger:
        return await service.rb.fleet.finish_weight_update(version, allow_rollback=fields.allow_rollback, **options)

    words = {"message": "Weight update finished"}
    work = with_version(service, finish, version, fields.model)
    return await answer(work, "finish_weight_update", VLLM, words=lambda _ledger: words)


def _version(text: str | None) -> int | None:
    """The number in vLLM's string, which may be any there."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= MAX_WEIGHT_VERSION):
        raise invalid("weight_version", "is no number", f"an integer from 0 to {MAX_WEIGHT_VERSION}")
    return int(text)
