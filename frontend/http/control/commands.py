"""The commands that a fleet is given over HTTP, whichever names a client calls them by."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import bus
from bus.objects.layout import split_objects
from bus.protocol.desired import wanted_loras
from frontend.http.control.answers import Manner, answer, status_of
from frontend.http.control.bodies import (
    AbortBody,
    FlushBody,
    LoadLoraBody,
    PauseBody,
    ResumeBody,
    SleepBody,
    UnloadLoraBody,
    UpdateBody,
    WakeBody,
)
from frontend.http.control.operations import begin_pause, wants_async
from frontend.http.control.reading import either, read_fields, send_options
from frontend.http.control.versions import with_version
from frontend.http.errors import HttpError, invalid
from frontend.http.service import Service
from schemas.control import LOAD_TIMEOUT_S, Pause, PauseMode
from schemas.errors import ControlError

__all__ = ["abort", "flush_cache", "load_lora", "pause", "resume", "sleep", "unload_lora", "update_weights", "wake"]

CHUNK_FIELDS = {"update_info", "model", "workers", "timeout_s"}
"""What may stand beside a part of the weights."""


async def pause(service: Service, request: Request, manner: Manner) -> Response:
    """Pause, and answer when it is done; or when it is recorded, where the client wants no more."""
    fields = await read_fields(service, request, PauseBody)
    mode = _pause_mode(fields)
    clear_cache = fields.clear_cache
    if clear_cache is None:
        clear_cache = manner.is_vllm and mode != "keep"
    options: dict[str, Any] = send_options(fields)
    command = Pause(mode=mode, clear_cache=clear_cache, **options)
    if fields.is_async or wants_async(request):
        return await begin_pause(service, command)
    return await answer(service.rb.fleet.send(command), "pause", manner, words=_is_paused)


def _pause_mode(fields: PauseBody) -> PauseMode:
    if not fields.wait_for_inflight_requests:
        return fields.mode or "keep"
    if fields.mode not in (None, "wait"):
        raise invalid("wait_for_inflight_requests", f"is true beside mode={fields.mode}", "with mode=wait")
    return "wait"


def _is_paused(ledger: bus.Ledger) -> dict[str, object]:
    in_flight = sum(ack.in_flight for ack in ledger.applied.values())
    return {"status": "paused", "inflight_requests": in_flight}


async def resume(service: Service, request: Request, manner: Manner) -> Response:
    """Resume, and answer when all take requests again."""
    options: dict[str, Any] = send_options(await read_fields(service, request, ResumeBody))
    work = service.rb.fleet.resume(**options)
    return await answer(work, "resume", manner, words=lambda _ledger: {"status": "resumed"})


async def flush_cache(service: Service, request: Request, manner: Manner) -> Response:
    """Forget the prefix caches, and answer when all have."""
    fields = await read_fields(service, request, FlushBody)
    if fields.reset_external:
        raise invalid("reset_external", "is true", "false, as the fleet has no external caches")
    preempt = either("preempt", fields.preempt, "reset_running_requests", fields.reset_running_requests)
    options: dict[str, Any] = send_options(fields)
    work = service.rb.fleet.flush_cache(preempt=bool(preempt), **options)
    return await answer(work, "flush_cache", manner, words=lambda _ledger: {"status": "ok", "success": True})


async def update_weights(service: Service, request: Request, manner: Manner) -> Response:
    """Replace the weights from a folder or the object store, or pass on a part of them, and answer when all have."""
    fields = await read_fields(service, request, UpdateBody)
    options: dict[str, Any] = send_options(fields)
    if fields.update_info is not None:
        _check_chunk(fields)
        options.setdefault("timeout_s", LOAD_TIMEOUT_S)
        chunk = service.rb.fleet.update_weight_chunk(fields.update_info, **options)
        return await answer(chunk, "update_weight_chunk", manner, words=_is_updated)
    path = either("path", fields.path, "weight_dir", fields.weight_dir)
    _check_source("weight_dir" if manner.is_vllm and fields.objects is None else "path", path, fields.objects)

    async def update(version: int) -> bus.Ledger:
        return await service.rb.fleet.update_weights(
            path,
            version=version,
            objects=fields.objects,
            mode=fields.mode,
            clear_cache=fields.clear_cache,
            allow_rollback=fields.allow_rollback,
            expected_canary=fields.expected_canary,
            **options,
        )

    work = with_version(service, update, fields.version, fields.model)
    return await answer(work, "update_weights", manner, words=_is_updated)


def _check_chunk(fields: UpdateBody) -> None:
    """Refuse what a part of the weights cannot have: their version, for one, is said when all have come."""
    for name in fields.__struct_fields__:
        if name not in CHUNK_FIELDS and getattr(fields, name) != getattr(UpdateBody(), name):
            raise invalid(name, "is given beside update_info", f"only {', '.join(sorted(CHUNK_FIELDS))}")


def _is_updated(ledger: bus.Ledger) -> dict[str, object]:
    versions = {ack.weight_version for ack in ledger.applied.values()}
    return {"status": "ok", "message": "Weights updated", "weight_version": max(versions, default=None)}


def _check_source(name: str, path: str | None, objects: str | None) -> None:
    if path is not None and objects is not None:
        raise invalid("objects", f"is given beside {name}", "one of them")
    if path is None and objects is None:
        raise invalid(name, "is missing", f"{name} or objects")
    if objects is not None:
        try:
            split_objects(objects)
        except ControlError as error:
            raise HttpError(400, f"objects: {error.message}", code=error.code, param="objects") from None


async def load_lora(service: Service, request: Request, manner: Manner, *, load_inplace: bool = True) -> Response:
    """Load an adapter, or replace the one of its name, and answer when all have.

    Args:
        load_inplace: where the client does not say: one of that name may be there already.
    """
    fields = await read_fields(service, request, LoadLoraBody)
    name = _lora_name(fields)
    shown = "path" if fields.lora_name is None else "lora_path"
    path = either("path", fields.path, "lora_path", fields.lora_path)
    _check_source(shown, path, fields.objects)
    if fields.is_3d_lora_weight:
        raise invalid("is_3d_lora_weight", "is true", "false")
    if fields.load_inplace is not None:
        load_inplace = fields.load_inplace
    if not load_inplace and await _is_loaded(service, name, fields.model):
        raise invalid("lora_name", f"is {name!r}, which is loaded", "another name, or load_inplace: true")
    options: dict[str, Any] = send_options(fields)
    work = service.rb.fleet.load_lora(name, path, version=fields.version, objects=fields.objects, **options)
    names = {"source": shown, "name": "name" if fields.lora_name is None else "lora_name"}
    return await answer(work, "load_lora", manner, words=lambda _ledger: {"status": "ok"}, names=names)


async def _is_loaded(service: Service, name: str, model: str | None) -> bool:
    """Some worker has the adapter, or should have it."""
    state = await service.rb.fleet.state()
    has_it = any(
        lora.name == name for worker in state.workers if model in (None, worker.model) for lora in worker.loras
    )
    return has_it or any(name in wanted_loras(each) for each in state.desired.values() if model in (None, each.model))


async def unload_lora(service: Service, request: Request, manner: Manner) -> Response:
    """Unload an adapter, and answer when none has it."""
    fields = await read_fields(service, request, UnloadLoraBody)
    options: dict[str, Any] = send_options(fields)
    work = service.rb.fleet.unload_lora(_lora_name(fields), **options)
    names = {"name": "name" if fields.lora_name is None else "lora_name"}
    return await answer(work, "unload_lora", manner, words=lambda _ledger: {"status": "ok"}, names=names)


def _lora_name(fields: LoadLoraBody | UnloadLoraBody) -> str:
    name = either("name", fields.name, "lora_name", fields.lora_name)
    if name is None:
        raise invalid("name", "is missing", "the adapter's name")
    return name


async def abort(service: Service, request: Request, manner: Manner) -> Response:
    """End requests in flight, and answer when they have ended."""
    fields = await read_fields(service, request, AbortBody)
    # OpenAI's routes put their own word before the id.
    bare = [name.removeprefix("chatcmpl-").removeprefix("cmpl-") for name in fields.request_ids]
    names = tuple(dict.fromkeys([*fields.request_ids, *bare]))
    options: dict[str, Any] = send_options(fields)
    return await answer(_aborted(service, names, options, manner), "abort", manner, words=_num_aborted)


async def _aborted(service: Service, names: tuple[str, ...], options: dict[str, Any], manner: Manner) -> bus.Ledger:
    try:
        return await service.rb.fleet.abort(names, **options)
    except bus.CommandIncomplete as error:
        # vLLM does not mind requests that it does not have: they may just have ended.
        if manner.is_vllm and status_of(error.ledger, "abort")[0] == 404:
            return error.ledger
        raise


def _num_aborted(ledger: bus.Ledger) -> dict[str, object]:
    return {"status": "aborted", "aborted": sum(len(ack.request_ids or ()) for ack in ledger.applied.values())}


async def sleep(service: Service, request: Request, manner: Manner) -> Response:
    """Have engines give up their memory, and answer when all have."""
    fields = await read_fields(service, request, SleepBody)
    if fields.mode != "abort":
        raise invalid("mode", f"is {fields.mode}", f"abort, behind a pause with mode={fields.mode}")
    options: dict[str, Any] = send_options(fields)
    work = service.rb.fleet.sleep(fields.level, **options)
    return await answer(work, "sleep", manner, words=lambda _ledger: {"status": "asleep"})


async def wake(service: Service, request: Request, manner: Manner) -> Response:
    """Undo `sleep`, and answer when all have."""
    fields = await read_fields(service, request, WakeBody)
    if fields.tags:
        raise invalid("tags", "is given", "null: all memory comes back at once")
    options: dict[str, Any] = send_options(fields)
    return await answer(service.rb.fleet.wake(**options), "wake", manner, words=lambda _ledger: {"status": "awake"})
