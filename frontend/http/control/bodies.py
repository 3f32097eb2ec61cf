"""Fields of the control routes: rollbus's own names, and those of vLLM and prime-rl, which the same routes accept.

The fields have the names of the options of `rollbus.Fleet`. They come from a JSON body or, as vLLM's clients send them,
from query parameters. Each route has one struct with all its fields. The code that uses the fields checks which of them
exclude each other.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from ....bus.protocol.fleet.loans import LOAN_S
from ....schemas import limits
from ....schemas.control import PauseMode
from ....schemas.decoding import JsonObject
from ....schemas.limits import NonEmptyName as Name
from ....schemas.limits import Version
from ....schemas.weights import Canary
from ..body import decode_body, read_body
from ..errors import invalid
from ..service import Service

Seconds = Annotated[float, Meta(gt=0, le=limits.MAX_TIMEOUT_S)]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Workers = Annotated[tuple[str, ...], Meta(min_length=1, max_length=limits.MAX_WORKER_OVERRIDES)]


class SendBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that a command is for, and its timeout."""

    model: Name | None = None
    """The model whose workers execute the command; None: workers of every model. Some commands allow only one model."""
    workers: Workers | None = None
    """Ids of the workers that execute the command; None: all workers, also workers that start later."""
    timeout_s: Seconds | None = None
    """Seconds for each worker to execute the command; None: 60, or 600 for commands that load weights."""


class PauseBody(SendBody, frozen=True, kw_only=True):
    """Accept no more requests."""

    mode: PauseMode | None = None
    """Handling of the requests in flight; None: `keep`."""
    clear_cache: bool | None = None
    """True: also reset the prefix cache. None: false; on vLLM's route `/pause`, true unless `mode` is `keep`."""
    wait_for_inflight_requests: bool | None = None
    """vLLM's older name for `mode=wait`."""
    is_async: bool = msgspec.field(default=False, name="async")
    """True: answer 202 with the id of an operation as soon as the pause is recorded. The header `Prefer: respond-async`
    does the same."""


class ResumeBody(SendBody, frozen=True, kw_only=True):
    """Accept requests again."""


class DrainBody(SendBody, frozen=True, kw_only=True):
    """Hand the requests in flight to other workers and accept no more, until `resume`."""

    workers: Workers
    """Ids of the workers. There is no default, because a drain of all workers leaves no worker for the requests."""


class ReturnBody(SendBody, frozen=True, kw_only=True):
    """End the loan of one worker: it loads the recorded weights and serves."""

    workers: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1)]
    """Id of the worker, in a list."""


class LendBody(ReturnBody, frozen=True, kw_only=True):
    """Lend the GPU of one worker: the worker sleeps for a term, with nothing kept in the memory of the GPU."""

    for_s: Seconds = LOAN_S
    """Term in seconds, by the worker's clock."""
    allow_none: bool = False
    """True: it may be the last worker that serves its model."""


class FlushBody(SendBody, frozen=True, kw_only=True):
    """Reset the prefix cache."""

    preempt: bool | None = None
    """True: also reset the cache of requests in flight. Otherwise the command fails if requests in flight use it."""
    reset_running_requests: bool | None = None
    """vLLM's name for `preempt`."""
    reset_external: bool = False
    """vLLM's field. Only false is allowed, because the fleet has no external caches."""


class WeightsBody(SendBody, frozen=True, kw_only=True):
    """The version of new weights."""

    version: Version | None = None
    """Version of the new weights; None: one more than the newest applied or recorded version."""
    weight_version: Name | None = None
    """Field of Dynamo and vLLM: any text. A number is the version. Other text becomes the label of the version, which
    `/weight_info` returns."""
    allow_rollback: bool = False
    """True: the version may be older than the present version, or equal to it with another source."""
    transfer: Name | None = None
    """Id of the transfer that must be open; None: any of the same user. In updates only with `update_info`."""


class UpdateBody(WeightsBody, frozen=True, kw_only=True):
    """Replace the weights from exactly one source: `path` or `weight_dir`, `objects`, or `update_info`."""

    path: Path | None = None
    """Folder on the workers' machines, below one of their weight roots."""
    objects: Path | None = None
    """`<bucket>/<prefix>` in the NATS object store."""
    weight_dir: Path | None = None
    """prime-rl's name for `path`."""
    update_info: JsonObject | None = None
    """vLLM's field: a part of the weights, in the format of the engines' transfer backend."""
    mode: PauseMode = "keep"
    """Handling of the requests in flight during the load."""
    clear_cache: bool | None = None
    """True: reset the prefix cache. None: true unless `mode` is `keep`. New requests never use cache entries of older
    weights."""
    expected_canary: Canary | None = None
    """Canary result of the trainer's own copy of the weights; None: no comparison with the trainer."""
    min_staged: Annotated[int, Meta(ge=1)] | None = None
    """Number of workers that must stage the weights before the switch; None: all workers. The command does not wait for
    the other workers."""
    skip_prefix_cache_reset: bool = False
    """prime-rl's field. It has no effect, because new requests never use cache entries of older weights."""


class ArealUpdateBody(SendBody, frozen=True, kw_only=True):
    """The fields of AReaL for new weights. The fleet is paused already, or pauses with `mode=abort` for the load."""

    model_path: Path
    """Directory on the workers' machines, below one of their weight roots."""
    load_format: Literal["auto"] | None = None
    """AReaL's field. Only `auto` is allowed: the format is that of the files."""
    abort_all_requests: bool = False
    """AReaL's field. It has no effect, because AReaL's server aborts the requests in flight in both cases."""


class LoraBody(SendBody, frozen=True, kw_only=True):
    """The name of a LoRA adapter."""

    name: Name | None = None
    """Name of the adapter in requests."""
    lora_name: Name | None = None
    """vLLM's name for `name`."""


class LoadLoraBody(LoraBody, frozen=True, kw_only=True):
    """Load a LoRA adapter, or replace the adapter with the same name."""

    path: Path | None = None
    """Folder on the workers' machines, below one of their weight roots."""
    objects: Path | None = None
    """`<bucket>/<prefix>` in the NATS object store."""
    lora_path: Path | None = None
    """vLLM's name for `path`."""
    version: Version | None = None
    """Version of the adapter; None: one more than the recorded version."""
    load_inplace: bool | None = None
    """vLLM's field. True if the adapter may replace a loaded adapter of the same name. None: true; on vLLM's route
    `/v1/load_lora_adapter`, false."""
    is_3d_lora_weight: bool = False
    """vLLM's field. Only false is allowed."""


class LoraSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The location of an adapter."""

    uri: Path
    """`file:///FOLDER` or `/FOLDER` on the workers' machines, or `objects:<bucket>/<prefix>` in NATS's object store."""


class AddLoraBody(SendBody, frozen=True, kw_only=True):
    """Dynamo's body: load a LoRA adapter, or replace the adapter with the same name."""

    lora_name: Name
    """Name of the adapter in requests."""
    source: LoraSource
    """Location of the adapter."""
    load_inplace: bool = True
    """True if the adapter may replace a loaded adapter of the same name."""


class UnloadLoraBody(LoraBody, frozen=True, kw_only=True):
    """Unload a LoRA adapter. An adapter that no worker has is 404."""

    lora_int_id: int | None = None
    """vLLM's field. It has no effect."""


class AbortBody(SendBody, frozen=True, kw_only=True):
    """Abort requests in flight of any client, and those that wait at any HTTP service."""

    request_ids: Annotated[tuple[str, ...], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """Request ids from answers, with or without the prefix `chatcmpl-` or `cmpl-`. Null or empty on vLLM's route: all.
    Requests at HTTP services may also wait or be prepared. `/v1/rl/abort` needs ids."""


class SleepBody(SendBody, frozen=True, kw_only=True):
    """Free the memory of the engines. Requests in flight go back to the queue."""

    level: Literal[1, 2] = 1
    """Level 1 keeps the weights in the machine's memory; level 2 drops them."""
    mode: PauseMode = "abort"
    """vLLM's field. Only `abort` is allowed. To let the requests finish, pause with `mode=wait` first."""


class WakeBody(SendBody, frozen=True, kw_only=True):
    """Restore the memory of sleeping engines."""

    tags: tuple[Literal["weights", "kv_cache", "scheduling"], ...] | None = None
    """vLLM's field: parts of the memory. Any of them restores all memory, and workers accept requests again. To hold
    the requests until there are new weights, pause before `sleep`."""


class InitTransferBody(SendBody, frozen=True, kw_only=True):
    """Initialize the engines' own transfer of weights, as vLLM's route does."""

    init_info: JsonObject
    """Arguments in the format of the engines' transfer backend. Without `workers`, each worker gets its own
    `rank_offset`: the `rank_offset` in this field plus the worker's `rank_offset` from `/get_world_size`."""


class StartTransferBody(SendBody, frozen=True, kw_only=True):
    """Start to receive weights from the transfer engine."""

    mode: PauseMode = "keep"
    """Handling of the requests in flight during the transfer."""
    is_checkpoint_format: bool = True
    """Field of earlier vLLM releases. Only true is allowed: the tensors have the names and shapes of a checkpoint."""


class FinishTransferBody(WeightsBody, frozen=True, kw_only=True):
    """Use the weights that were transferred."""


class CancelTransferBody(SendBody, frozen=True, kw_only=True):
    """End an open transfer of weights. The workers load the desired weights again."""

    transfer: Name | None = None
    """Id of the transfer to end; None: whichever is open."""


Fields = TypeVar("Fields", bound=SendBody)
Query = TypeVar("Query", bound=msgspec.Struct)
Value = TypeVar("Value")

REPEATED = ("workers", "request_ids", "tags")
"""Parameters that are lists. A query repeats them, once for each item."""


async def read_fields(service: Service, request: Request, kind: type[Fields]) -> Fields:
    """Return the fields from the body or from the query.

    Raises:
        HttpError: 413 if the body is too large. 400 if a field is unknown, is missing or has the wrong type, or if body
            and query both have fields; the error names the field.
        ClientDisconnect: the client disconnected before its body was complete.
    """
    body = await read_body(request, service.settings)
    if not request.query_params:
        return decode_body(body, kind)
    if body.strip() not in (b"", b"{}", b"null"):
        name = next(iter(request.query_params))
        raise invalid(name, "is a query parameter, but the request has a body too", "all fields in one of them")
    return read_query(request, kind)


def read_query(request: Request, kind: type[Query]) -> Query:
    """Return the query parameters as a struct.

    Raises:
        HttpError: 400 if a parameter is unknown, has the wrong type or is repeated; the error names the parameter.
    """
    lists: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        lists.setdefault(name, []).append(value)
    given = {name: each if name in REPEATED or len(each) > 1 else each[0] for name, each in lists.items()}
    # All values in a query are strings. The type of each field decides how its string is converted.
    return decode_body(msgspec.json.encode(given), kind)


def either(name: str, value: Value | None, other_name: str, other: Value | None) -> Value | None:
    """Return the value of a field that has two names.

    Raises:
        HttpError: 400, both names have a value.
    """
    if value is not None and other is not None:
        raise invalid(other_name, f"is another name for {name}, which is also given", "one of the two")
    return other if value is None else value
