"""Commands to the fleet over HTTP, under rollbus's route names and those of vLLM, prime-rl and Dynamo."""

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from .... import bus
from ....bus.client.client import watch_fleet
from ....bus.objects.layout import split_objects
from ....bus.protocol.fleet.desired import desired_loras, served_version
from ....schemas.checks import describe
from ....schemas.control import LOAD_TIMEOUT_S, AnyCommand, Pause, PauseMode
from ....schemas.decoding import JsonObject
from ....schemas.errors import ControlCode, ControlError, ErrorCode, InvalidRequest, LocalProtocolError, NoWorkers
from ....schemas.limits import MAX_WEIGHT_VERSION
from ...command_json import result_as_json, without_prefix
from ..calls import json_response
from ..errors import HttpError, http_error, invalid, unsupported
from ..service import Service
from . import bodies
from .answers import LORA_OF_PRIME, NAMES, ResponseStyle, is_done_by_the_living, result_response, status_of
from .bodies import Fields, either, read_query
from .reads import (
    KEY_END,
    SETTLE_S,
    FleetQuery,
    begin_pause,
    begin_transfer,
    find_recorded,
    fleet_state,
    key_of,
    stale_field,
    wants_async,
)
from .services import Waiting

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
    state = await fleet_state(service, model)
    models = sorted({worker.model for worker in state.workers})
    if len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(models)}")
    recorded = [served_version(state.desired.get(models[0]), worker.worker) or 0 for worker in state.workers]
    return max(*(worker.served_version for worker in state.workers), *recorded) + 1


CHUNK_FIELDS: Final = frozenset({"update_info", "transfer", "model", "workers", "timeout_s"})
"""Fields that are allowed together with `update_info`, which carries a part of the weights."""
CHECKPOINT_FORMAT: Final = "is_checkpoint_format"
"""Key in `update_info` from clients of earlier vLLM releases. Later releases do not know it."""

LOADED: Final = {"status": "ok"}
"""Fields of the adapter routes' answers in addition to the command result."""

HTTP_ADMIN: Final = "http:admin"
"""Owner of transfers, and author of commands, of those who know the admin token."""
HTTP_ANYONE: Final = "http:anyone"
"""The same without an admin token: all callers are one owner."""

KEY_HEADER: Final = "Idempotency-Key"
KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


Other = TypeVar("Other", bound=bodies.SendBody)
Versions = TypeVar("Versions", bound=bodies.WeightsBody)


@dataclass(frozen=True, slots=True)
class CommandCall(Generic[Fields]):
    """One HTTP request for a command: its decoded fields, and the style of the answer."""

    service: Service
    request: Request
    fields: Fields
    style: ResponseStyle
    id: str | None = None
    """Id of the command of the client's key, the same at all services; None: the client sent no key."""
    recorded: tuple[AnyCommand, ...] | None = None
    """If the command of the key is recorded already, by whichever service: what registers still hold of it."""

    @property
    def fleet(self) -> bus.Fleet:
        """The fleet that executes the command."""
        return self.service.rb.fleet

    @property
    def user(self) -> str:
        """The user of the token, who owns the transfers that it begins, on whichever service."""
        return HTTP_ADMIN if self.service.settings.admin_token is not None else HTTP_ANYONE

    @property
    def options(self) -> JsonObject:
        """The options of all commands as arguments of `rollbus.Fleet`, without those that the client did not set."""
        own = {**self._sent_to, "by": self.user, "id": self.id}
        return {name: value for name, value in own.items() if value is not None}

    @property
    def _sent_to(self) -> JsonObject:
        """The fields that all commands have."""
        return {name: getattr(self.fields, name) for name in bodies.SendBody.__struct_fields__}

    def with_fields(self, kind: type[Other], **fields: Any) -> "CommandCall[Other]":
        """Return this call with the fields of another route for the same workers."""
        own = kind(**self._sent_to, **fields)
        return CommandCall(self.service, self.request, own, self.style, self.id, self.recorded)

    @property
    def recorded_version(self) -> int | None:
        """The version that the recorded command has, so that a repeat chooses no other one; None: unknown."""
        versions = [getattr(each, "version", None) for each in self.recorded or ()]
        return next((each for each in versions if each is not None), None)

    async def answer(
        self,
        work: Awaitable[bus.CommandResult],
        command: str,
        extra: Mapping[str, object] | Callable[[bus.CommandResult], Mapping[str, object]],
        names: Mapping[str, str] | None = None,
    ) -> Response:
        """Wait for a command and answer with its result.

        If the client disconnects, the command continues until its own timeout.

        Args:
            command: name of the requested command. `work` may send other commands before it.
            extra: additional fields of the answer if all workers have applied the command.
            names: the route's names for fields, where the names differ.

        Raises:
            HttpError: 400 if a field is wrong, 413 if the command exceeds the size of one message.
            RollbusError: any error of `rollbus.Fleet` except `CommandIncomplete`.
        """
        try:
            result = await work
        except bus.CommandIncomplete as error:
            living = {worker.worker for worker in self.fleet.workers}
            # A trainer that was written for one engine ends at an error, although requests of a dead worker go on.
            if not (self.style.is_vllm and is_done_by_the_living(error, living)):
                return result_response(error, command, self.style)
            result = error.ledger
        except InvalidRequest as error:
            raise http_error(error, {**NAMES, **(names or {})}) from None
        except LocalProtocolError as error:
            # A command raises this error only if its message is too large for NATS. No worker has received it.
            raise HttpError(413, str(error), code=ErrorCode.TOO_LARGE) from None
        if self.style.text is not None:
            return PlainTextResponse(self.style.text)
        return json_response({**(extra(result) if callable(extra) else extra), **result_as_json(result)})


async def read_key(call: CommandCall[Fields]) -> CommandCall[Fields]:
    """Return the call with the id of its command, if the client sent a key.

    The id depends on the content, so that workers never answer another command with the acks of an earlier one.

    Raises:
        HttpError: 400, the key has other characters or is too long; 422, it is that of another recorded command.
    """
    key = call.request.headers.get(KEY_HEADER)
    if key is None:
        return call
    if KEY.fullmatch(key) is None:
        raise invalid(KEY_HEADER, f"is {describe(key)}", "1 to 64 of A-Z a-z 0-9 _ -")
    content = call.request.url.path.encode() + b"\0" + msgspec.json.encode(call.fields)
    own = f"{key}{KEY_END}{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    states = (await watch_fleet(call.service.rb).desired()).values()
    ids = {seen.id for state in states for seen in state.seen if key_of(seen.id) == key}
    # One call may record several commands, whose ids begin with its own.
    if not all(f"{each}{KEY_END}".startswith(own + KEY_END) for each in ids):
        problem = "is that of a recorded command with other fields"
        raise HttpError(422, f"{KEY_HEADER} {problem}; allowed: a new key", code="key_reused", param=KEY_HEADER)
    return replace_fields(call, id=own, recorded=find_recorded(states, ids) if ids else None)


async def pause(call: CommandCall[bodies.PauseBody]) -> Response:
    """Pause workers: they accept no more requests. With `async`, answer 202 with an operation that clients can read."""
    fields = call.fields
    mode = _pause_mode(fields)
    clear_cache = fields.clear_cache
    if clear_cache is None:
        clear_cache = call.style.is_vllm and mode != "keep"
    command = Pause(mode=mode, clear_cache=clear_cache, **call.options)
    if fields.is_async or wants_async(call.request):
        return await begin_pause(call.service, command)
    return await call.answer(call.fleet.send(command), "pause", _describe_pause)


def _pause_mode(fields: bodies.PauseBody) -> PauseMode:
    if not fields.wait_for_inflight_requests:
        return fields.mode or "keep"
    if fields.mode not in (None, "wait"):
        raise invalid(
            "wait_for_inflight_requests",
            f"is true together with mode={fields.mode}",
            "true with mode=wait or without mode",
        )
    return "wait"


def _describe_pause(result: bus.CommandResult) -> dict[str, object]:
    return {"status": "paused", "inflight_requests": sum(ack.in_flight for ack in result.applied.values())}


async def resume(call: CommandCall[bodies.ResumeBody]) -> Response:
    """Resume workers after a pause or a drain: they accept requests again."""
    return await call.answer(call.fleet.resume(**call.options), "resume", {"status": "resumed"})


async def drain(call: CommandCall[bodies.DrainBody]) -> Response:
    """Drain workers: they hand their requests to other workers and accept no more, until `resume`."""
    work = call.fleet.drain(call.fields.workers, **_without_workers(call.options))
    return await call.answer(work, "drain", {"status": "drained"})


def _without_workers(options: JsonObject) -> JsonObject:
    """Return the options without the workers, for a method that has them as an argument."""
    return {name: value for name, value in options.items() if name != "workers"}


async def flush_cache(call: CommandCall[bodies.FlushBody]) -> Response:
    """Reset the prefix caches. Requests in flight make it fail unless `preempt` or `reset_running_requests` is true."""
    fields = call.fields
    if fields.reset_external:
        raise invalid("reset_external", "is true", "false: the fleet has no external caches")
    preempt = either("preempt", fields.preempt, "reset_running_requests", fields.reset_running_requests)
    work = call.fleet.flush_cache(preempt=bool(preempt), **call.options)
    return await call.answer(work, "flush_cache", {"status": "ok", "success": True})


async def update_weights(call: CommandCall[bodies.UpdateBody]) -> Response:
    """Replace the weights of all workers of a model. With vLLM's `update_info`, pass a part of them to the engines."""
    fields = call.fields
    if fields.update_info is not None:
        _check_chunk(fields)
        info = dict(fields.update_info)
        _check_format("update_info.is_checkpoint_format", info.pop(CHECKPOINT_FORMAT, True))
        options = {"timeout_s": LOAD_TIMEOUT_S, "transfer": fields.transfer, **call.options}
        chunk = call.fleet.update_weight_chunk(info, **options)
        return await call.answer(chunk, "update_weight_chunk", _is_updated)
    if fields.transfer is not None:
        raise invalid("transfer", "is given without update_info", "only with update_info")
    path = either("path", fields.path, "weight_dir", fields.weight_dir)
    _check_source("weight_dir" if call.style.is_vllm and fields.objects is None else "path", path, fields.objects)

    given, label = _choose_version(call)
    adapter: dict[str, object] = {}

    async def update(version: int) -> bus.CommandResult:
        try:
            return await call.fleet.update_weights(
                path,
                version=version,
                label=label,
                objects=fields.objects,
                mode=fields.mode,
                clear_cache=fields.clear_cache,
                allow_rollback=fields.allow_rollback,
                expected_canary=fields.expected_canary,
                min_staged=fields.min_staged,
                **call.options,
            )
        except bus.CommandIncomplete as error:
            if not call.style.is_vllm or not _is_of_adapter(error.ledger):
                raise
            models = {worker.model for worker in call.fleet.workers if worker.worker in error.ledger.failed}
        # prime-rl sends its adapters as weights. They answer under the name of the model.
        _check_for_adapter(fields)
        adapter["weight_version"] = version
        sent = {"objects": fields.objects, **call.options}
        if "id" in sent:
            # A worker executes a command once per id.
            sent["id"] = f"{sent['id']}{KEY_END}adapter"
        return await call.fleet.load_lora(models.pop(), path, version=version, for_base=True, **sent)

    work = with_version(call.service, update, given, fields.model)
    return await call.answer(work, "update_weights", lambda result: {**_is_updated(result), **adapter})


def _choose_version(call: CommandCall[Versions]) -> tuple[int | None, str | None]:
    """Return the version and label of new weights; of a recorded command, its version."""
    given, label = version_and_label(call.fields.version, call.fields.weight_version)
    return (call.recorded_version if given is None else given), label


def _is_of_adapter(result: bus.CommandResult) -> bool:
    """Return True if all workers found an adapter instead of a checkpoint."""
    errors = {ack.error.code for ack in result.failed.values() if ack.error is not None}
    others = result.applied or result.unsupported or result.stale or result.late or result.missing
    return errors == {ControlCode.IS_ADAPTER} and not others


def _check_for_adapter(fields: bodies.UpdateBody) -> None:
    """Reject fields that have no effect on an adapter."""
    for name in ("weight_version", "mode", "clear_cache", "allow_rollback", "expected_canary", "min_staged"):
        value = getattr(fields, name)
        is_number = name == "weight_version" and version_and_label(None, value)[1] is None
        if value and value != getattr(bodies.UpdateBody(), name) and not is_number:
            raise invalid(name, "is given together with the directory of an adapter", "only with a whole checkpoint")


def _check_chunk(fields: bodies.UpdateBody) -> None:
    """Reject fields that a part of the weights cannot have.

    For example, the client sets the version only after all parts have arrived.
    """
    for name in fields.__struct_fields__:
        if name not in CHUNK_FIELDS and getattr(fields, name) != getattr(bodies.UpdateBody(), name):
            raise invalid(name, "is given together with update_info", f"only {', '.join(sorted(CHUNK_FIELDS))}")


def _check_format(field: str, is_checkpoint_format: object) -> None:
    """Reject weights that an engine would have to copy unchanged: vLLM 0.30 to 0.33 loads all in checkpoint format."""
    if is_checkpoint_format is not True:
        raise unsupported(field, "engines load only tensors with the names and shapes of a checkpoint", allowed="true")


def _is_updated(result: bus.CommandResult) -> dict[str, object]:
    versions = {ack.weight_version for ack in result.applied.values()}
    return {"status": "ok", "message": "Weights updated", "weight_version": max(versions, default=None)}


def _check_source(name: str, path: str | None, objects: str | None) -> None:
    if path is not None and objects is not None:
        raise invalid("objects", f"is given together with {name}", "one of the two")
    if path is None and objects is None:
        raise invalid(name, "is missing", f"{name} or objects")
    if objects is not None:
        try:
            split_objects(objects)
        except ControlError as error:
            raise HttpError(400, f"objects: {error.message}", code=error.code, param="objects") from None


async def load_lora(
    call: CommandCall[bodies.LoadLoraBody],
    *,
    extra: Mapping[str, object] = LOADED,
    names: Mapping[str, str] | None = None,
) -> Response:
    """Load a LoRA adapter into all workers of a model, or replace the adapter with that name if this is allowed."""
    fields = call.fields
    name = _lora_name(fields)
    shown = "path" if fields.lora_name is None else "lora_path"
    path = either("path", fields.path, "lora_path", fields.lora_path)
    _check_source(shown, path, fields.objects)
    if fields.is_3d_lora_weight:
        raise invalid("is_3d_lora_weight", "is true", "false")
    may_replace = call.style.may_replace if fields.load_inplace is None else fields.load_inplace
    if not may_replace and call.recorded is None and await is_loaded(call.fleet, name, fields.model):
        raise invalid("lora_name", f"is {name!r}, which is already loaded", "another name, or load_inplace: true")
    version = call.recorded_version if fields.version is None else fields.version
    work = call.fleet.load_lora(name, path, version=version, objects=fields.objects, **call.options)
    own_names = {"source": shown, "name": "name" if fields.lora_name is None else "lora_name"}
    return await call.answer(work, "load_lora", extra, {**own_names, **(names or {})})


async def is_loaded(fleet: bus.Fleet, name: str, model: str | None) -> bool:
    """Return True if a worker has the adapter, or should have it according to the desired state."""
    state = await fleet.state()
    has_it = any(
        lora.name == name for worker in state.workers if model in (None, worker.model) for lora in worker.loras
    )
    return has_it or any(name in desired_loras(each) for each in state.desired.values() if model in (None, each.model))


async def unload_lora(call: CommandCall[bodies.UnloadLoraBody], *, extra: Mapping[str, object] = LOADED) -> Response:
    """Unload a LoRA adapter. Answer 404 if no worker has it and no worker should have it."""
    fields = call.fields
    work = call.fleet.unload_lora(_lora_name(fields), **call.options)
    names = {"name": "name" if fields.lora_name is None else "lora_name"}
    return await call.answer(work, "unload_lora", extra, names)


def _lora_name(fields: bodies.LoraBody) -> str:
    name = either("name", fields.name, "lora_name", fields.lora_name)
    if name is None:
        raise invalid("name", "is missing", "the name of the adapter")
    return name


async def abort(call: CommandCall[bodies.AbortBody]) -> Response:
    """Abort requests of any client, also those that wait at a service. Unknown ids: 404, or 200 under vLLM's route."""
    fields, given = call.fields, call.fields.request_ids
    names = tuple(dict.fromkeys([*given, *map(without_prefix, given)])) if given else None
    if names is None and not call.style.is_vllm:
        raise invalid("request_ids", "is missing", "at least one id; /abort_requests without ids aborts all requests")
    own = Waiting() if fields.workers else await call.service.services.find("abort", fields.model, names)
    return await call.answer(_abort_requests(call, names, own), "abort", lambda result: _num_aborted(result, own))


async def _abort_requests(
    call: CommandCall[bodies.AbortBody], names: tuple[str, ...] | None, own: Waiting
) -> bus.CommandResult:
    """Abort the workers' requests, after the services have aborted their `own`."""
    try:
        result = await call.fleet.abort(names, **call.options)
    except bus.CommandIncomplete as error:
        # vLLM reports no error for unknown requests, because they may have ended just before.
        if status_of(error.ledger, "abort")[0] != 404:
            raise
        if not (own.requests or call.style.is_vllm):
            raise bus.CommandIncomplete(error.ledger, own.note) from None
        result = error.ledger
    except NoWorkers:
        # The requests waited for a worker that starts.
        if not own.requests:
            raise
        result = bus.CommandResult(command="abort", id="")
    ended = {each.request_id for each in own.requests}
    # Of ids that an answer has left out, nothing is known.
    unknown = () if own.left_out else result.not_found
    return replace(result, not_found=tuple(name for name in unknown if without_prefix(name) not in ended))


def _num_aborted(result: bus.CommandResult, own: Waiting) -> dict[str, object]:
    at_workers = {name for ack in result.applied.values() for name in ack.request_ids or ()}
    # A worker's ack has the ids of the command, which are those of the clients if it has any.
    at_services = {(each.service, each.wire_id) for each in own.requests}
    others = at_workers.difference(*((each.wire_id, each.request_id) for each in own.requests))
    silent = {"silent_services": own.silent} if own.silent else {}
    return {"status": "aborted", "aborted": len(at_services) + own.left_out + len(others), **silent}


async def sleep(call: CommandCall[bodies.SleepBody]) -> Response:
    """Free the memory of the engines. Requests in flight go back to the queue."""
    mode = call.fields.mode
    if mode != "abort":
        raise invalid("mode", f"is {mode}", f"abort, after a pause with mode={mode}")
    return await call.answer(call.fleet.sleep(call.fields.level, **call.options), "sleep", {"status": "asleep"})


async def wake(call: CommandCall[bodies.WakeBody]) -> Response:
    """Restore the memory of sleeping engines. All memory returns at once, also with vLLM's `tags` of a part of it."""
    return await call.answer(call.fleet.wake(**call.options), "wake", {"status": "awake"})


async def lend(call: CommandCall[bodies.LendBody]) -> Response:
    """Lend the GPU of one worker for a term: the worker sleeps, with nothing kept in the memory of the GPU."""
    fields, options = call.fields, _without_workers(call.options)
    work = call.fleet.lend(fields.workers[0], for_s=fields.for_s, allow_none=fields.allow_none, **options)
    return await call.answer(work, "sleep", {"status": "lent"})


async def return_worker(call: CommandCall[bodies.ReturnBody]) -> Response:
    """End the loan of one worker: it loads the recorded weights, verifies them and serves."""
    work = call.fleet.return_worker(call.fields.workers[0], **_without_workers(call.options))
    return await call.answer(work, "wake", {"status": "returned"})


async def init_weight_transfer(call: CommandCall[bodies.InitTransferBody]) -> Response:
    """Initialize vLLM's own transfer of weights in the engines of all workers of a model."""
    work = begin_transfer(call.service, call.fields.init_info, **{"timeout_s": LOAD_TIMEOUT_S, **call.options})
    extra = {"message": "Weight transfer initialized"}
    return await call.answer(work, "init_weight_transfer", extra, {"info": "init_info"})


async def start_weight_update(call: CommandCall[bodies.StartTransferBody]) -> Response:
    """Hold the requests in flight and start to receive weights from the transfer engine."""
    _check_format(CHECKPOINT_FORMAT, call.fields.is_checkpoint_format)
    work = call.fleet.start_weight_update(mode=call.fields.mode, **call.options)
    extra = {"message": "Weight update started"}
    return await call.answer(work, "start_weight_update", lambda result: {**extra, "transfer": result.id})


async def cancel_weight_update(call: CommandCall[bodies.CancelTransferBody]) -> Response:
    """End the open transfer of weights of any user. The workers load the desired weights again."""
    work = call.fleet.cancel_weight_update(transfer=call.fields.transfer, **call.options)
    return await call.answer(work, "cancel_weight_update", {"status": "cancelled"})


async def finish_weight_update(call: CommandCall[bodies.FinishTransferBody]) -> Response:
    """Use the transferred weights under the client's version, or under the next version."""
    fields = call.fields
    given, label = _choose_version(call)

    async def finish(version: int) -> bus.CommandResult:
        return await call.fleet.finish_weight_update(
            version, allow_rollback=fields.allow_rollback, label=label, transfer=fields.transfer, **call.options
        )

    work = with_version(call.service, finish, given, fields.model)
    return await call.answer(work, "finish_weight_update", {"message": "Weight update finished"})


FILE: Final = "file://"
OBJECTS: Final = "objects:"


async def list_loras(service: Service, request: Request) -> Response:
    """List the adapters that live workers have loaded, with newest version and workers, in Dynamo's format."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    state = await fleet_state(service, read_query(request, FleetQuery).model, SETTLE_S)
    for worker in state.workers:
        for lora in worker.loras:
            found.setdefault((lora.name, worker.model), {})[worker.worker] = lora.version
    # `workers`: the version of the adapter on each worker.
    adapters = [{"name": name, "model": model, "workers": found[name, model]} for name, model in sorted(found)]
    newest = {name: max(found[name, model].values()) for name, model in sorted(found)}
    answer = {"status": "success", "loras": newest, "count": len(adapters), "adapters": adapters}
    return json_response({**answer, **stale_field(state)})


async def add_lora(call: CommandCall[bodies.AddLoraBody]) -> Response:
    """Load a LoRA adapter into all workers of a model, or replace the one with that name, as Dynamo's route does."""
    fields = call.fields
    path, objects = parse_place(fields.source.uri, "source.uri")
    asked = call.with_fields(
        bodies.LoadLoraBody, name=fields.lora_name, path=path, objects=objects, load_inplace=fields.load_inplace
    )
    extra = {"status": "success", "message": f"adapter {fields.lora_name} is loaded", "lora_name": fields.lora_name}
    return await load_lora(asked, extra=extra, names={"source": "source.uri", "name": "lora_name"})


def parse_place(uri: str, field: str) -> tuple[str | None, str | None]:
    """Return the folder and the place in the object store that a URI names. One of the two is None.

    Raises:
        HttpError: 400, the URI names neither.
    """
    if uri.startswith(OBJECTS):
        return None, uri.removeprefix(OBJECTS)
    path = uri.removeprefix(FILE)
    if path.startswith("/"):
        return path, None
    raise invalid(field, f"is {uri[:64]!r}", "file:///FOLDER on the workers' machines, or objects:BUCKET/PREFIX")


async def remove_lora(service: Service, request: Request) -> Response:
    """Unload a LoRA adapter, as Dynamo's route does. Answer 404 if no worker has it and no worker should have it."""
    name = request.path_params["name"]
    sent = CommandCall(service, request, read_query(request, bodies.SendBody), LORA_OF_PRIME)
    call = await read_key(sent.with_fields(bodies.UnloadLoraBody, name=name))
    if call.recorded is None and not await is_loaded(service.rb.fleet, name, call.fields.model):
        raise HttpError(404, f"adapter {name[:64]!r} is not loaded", code=ControlCode.NOT_FOUND, param="name")
    extra = {"status": "success", "message": f"adapter {name} is unloaded", "lora_name": name}
    return await unload_lora(call, extra=extra)
