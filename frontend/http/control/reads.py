"""Routes that read the fleet: health, pauses, weights, the ranks of transfers, and the histories of requests.

A pause may go on after its answer 202, and any command after its service has died. Clients read its state later under
the id of the command, or under their key. No service stores these operations: the desired state in NATS has the command
and its workers, and the presence of each worker has its progress. Any service of the fleet can therefore answer, also a
service that started later. An id is valid while it is among the last recorded commands of its model. A later command
that sets the same supersedes the command.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus import RequestList
from ....bus.protocol.fleet.authority import unpinned
from ....bus.protocol.fleet.command_result import RESULTS, workers_that_must_ack
from ....bus.protocol.fleet.desired import SILENT, effective, list_stops, served_version, version_label
from ....bus.protocol.fleet.presence import open_transfers
from ....schemas.acks import Ack
from ....schemas.control import AnyCommand, DesiredState, FinishWeightUpdate, LoadLora, Pause, UnloadLora, UpdateWeights
from ....schemas.decoding import JsonObject
from ....schemas.errors import InvalidRequest, RollbusError
from ....schemas.presence import WorkerPresence, WorkerState
from ...command_json import RequestAnswer, RequestQuery, answer_of, find_timelines, unknown_request, without_prefix
from ..calls import first_error, json_response
from ..errors import HttpError, http_error, invalid, no_workers
from ..service import HttpRoute, RouteTable, Service
from .answers import NAMES, result_response
from .bodies import read_query
from .services import Waiting

PAUSED: Final = frozenset({WorkerState.PAUSED, WorkerState.DRAINED, WorkerState.ASLEEP})
"""States of workers that accept no requests because of a command."""
TAKING: Final = frozenset({WorkerState.SERVING, WorkerState.UPDATING})
"""States of workers that accept requests, or that have not finished a pause or an update."""
DEAD: Final = frozenset({WorkerState.FENCED, WorkerState.FAILED, WorkerState.STOPPED})
"""States of workers that `/liveness` counts as dead."""


class FleetQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that the answer covers."""

    model: str | None = None
    """Model of the workers; None: workers of every model."""


SETTLE_S: Final = 1.0
"""Seconds to wait for presence as new as the recorded state. It usually arrives within milliseconds of the acks."""


async def _state(service: Service, request: Request, settle_s: float = SETTLE_S) -> bus.FleetState:
    """Return the current state of the fleet; if the query has `model`, only the workers of that model.

    Raises:
        HttpError: 400 if a query parameter is unknown. Also the errors of `fleet_state`.
    """
    return await fleet_state(service, read_query(request, FleetQuery).model, settle_s)


def stale_field(state: bus.FleetState) -> dict[str, bool]:
    """Return the field `stale` of an answer if it may be older than the recorded state, else no field."""
    return {"stale": True} if state.stale else {}


async def fleet_state(service: Service, model: str | None, settle_s: float = 0.0) -> bus.FleetState:
    """Return the current state of the fleet; if `model` is not None, only the workers of that model.

    Args:
        settle_s: as in `rollbus.Fleet.state`.

    Raises:
        HttpError: 400 if the fleet has no worker of that model, 503 if the fleet has no workers.
    """
    state = await service.rb.fleet.state(settle_s=settle_s)
    if not state.workers:
        raise no_workers("the fleet has no workers")
    if model is None:
        return state
    workers = tuple(worker for worker in state.workers if worker.model == model)
    if not workers:
        models = sorted({worker.model for worker in state.workers})
        raise invalid("model", f"is {model[:64]!r}", f"one of {', '.join(models)}")
    return bus.FleetState(fleet=state.fleet, workers=workers, desired=state.desired)


async def rl_health(service: Service, request: Request) -> Response:
    """Answer 200 if a worker serves, will serve by itself, or will serve after a command; else 503.

    The answer names who stopped workers, and who has an open transfer of weights.
    """
    # Probes have short timeouts, so this does not wait.
    state = await _state(service, request, 0.0)
    is_well = any(worker.state.is_present or worker.state in PAUSED for worker in state.workers)
    transfers = open_transfers(state.workers).values()
    models = {worker.model for worker in state.workers}
    answer = {
        "status": "ok" if is_well else "unhealthy",
        "workers": Counter(worker.state for worker in state.workers),
        "errors": {worker.worker: worker.last_error for worker in state.workers if worker.last_error is not None},
        "unpinned": [line for desired in state.desired.values() for line in unpinned(desired)],
        "stops": list_stops({model: desired for model, desired in state.desired.items() if model in models}),
        "transfers": [{**msgspec.structs.asdict(transfer), "workers": workers} for transfer, workers in transfers],
        **stale_field(state),
    }
    return json_response(answer, 200 if is_well else 503)


async def liveness(service: Service, request: Request) -> Response:
    """Answer 200 if the process of any worker is live, else 503, as prime-rl's route does."""
    state = await _state(service, request, 0.0)
    is_alive = any(worker.state not in DEAD for worker in state.workers)
    return json_response({"status": "ok" if is_alive else "dead"}, 200 if is_alive else 503)


async def is_paused(service: Service, request: Request) -> Response:
    """Return true if no worker accepts requests and a command is the reason, as vLLM's route does."""
    state = await _state(service, request)
    states = {worker.state for worker in state.workers}
    return json_response({"is_paused": bool(states & PAUSED) and not states & TAKING, **stale_field(state)})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Return true if the engines of all workers have freed their memory, as vLLM's route does."""
    state = await _state(service, request)
    is_asleep = all(worker.state is WorkerState.ASLEEP for worker in state.workers)
    return json_response({"is_sleeping": is_asleep, **stale_field(state)})


async def weight_version(service: Service, request: Request) -> Response:
    """Return each worker's weight version, and the oldest and newest version of the workers that may serve.

    Of an adapter that answers under the model's name, this is the adapter's version.
    """
    state = await _state(service, request)
    able = [worker.served_version for worker in _able(state)]
    answer = {
        "weight_version": min(able),
        "newest_weight_version": max(able),
        "is_uniform": len(set(able)) == 1,
        "workers": {worker.worker: worker.served_version for worker in state.workers},
        "desired": {worker.worker: _target(state, worker) for worker in state.workers},
        **stale_field(state),
    }
    return json_response(answer)


def _target(state: bus.FleetState, worker: WorkerPresence) -> int | None:
    recorded = served_version(state.desired.get(worker.model), worker.worker)
    return worker.target_version if recorded is None else recorded


def _able(state: bus.FleetState) -> list[WorkerPresence]:
    """Return the workers that may serve; if no worker may serve, return all workers."""
    return [worker for worker in state.workers if worker.state in PAUSED | TAKING] or list(state.workers)


async def weight_info(service: Service, request: Request) -> Response:
    """Return the oldest weight version of the workers that may serve: its text as vLLM does, and its number."""
    state = await _state(service, request)
    worker = min(_able(state), key=lambda worker: worker.served_version)
    number = worker.served_version
    text = None
    if worker.base_adapter_version is None:
        text = version_label(state.desired.get(worker.model), worker.worker, number)
    return json_response({"weight_version": text or str(number), "version": number, **stale_field(state)})


READ_S: Final = 0.5
"""Seconds to wait for a worker's ack before the service reads the desired state."""


def wants_async(request: Request) -> bool:
    """Return True if the client prefers an immediate answer to an answer after the command has finished."""
    preferences = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(one.split(";")[0].strip() == "respond-async" for one in preferences)


async def begin_pause(service: Service, command: Pause) -> Response:
    """Answer 202 as soon as the pause is recorded. From then on, workers execute it even if this service ends.

    Raises:
        HttpError, RollbusError: the errors of a pause without `async`, if the pause was not recorded.
    """
    loop, acked = asyncio.get_running_loop(), asyncio.Event()

    def on_ack(_ack: Ack) -> None:
        # Workers send acks only for recorded commands.
        loop.call_soon_threadsafe(acked.set)

    try:
        with first_error():
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(service.rb.fleet.send(command, on_ack=on_ack))
                waiting = tasks.create_task(acked.wait())
                first = asyncio.FIRST_COMPLETED
                while not (await asyncio.wait((sending, waiting), timeout=READ_S, return_when=first))[0]:
                    if await _is_recorded(service, command):
                        break
                # The pause stays recorded. This service does not wait for the remaining acks.
                waiting.cancel()
                sending.cancel()
    except bus.CommandIncomplete as error:
        return result_response(error, command.command)
    except InvalidRequest as error:
        raise http_error(error, NAMES) from None
    status = "running" if sending.cancelled() else "succeeded"
    url = f"/v1/rl/operations/{command.id}"
    answer = json_response({"id": command.id, "operation": command.command, "status": status, "url": url}, 202)
    answer.headers.update({"Location": url, "Preference-Applied": "respond-async"})
    return answer


async def _is_recorded(service: Service, command: Pause) -> bool:
    state = await service.rb.fleet.state()
    try:
        models = workers_that_must_ack(state.workers, command)
    except RollbusError:
        # The command itself fails with the same error, unless a worker appears in time.
        return False
    recorded = {name for name, desired in state.desired.items() if any(each.id == command.id for each in desired.seen)}
    return recorded.issuperset(models)


async def operation(service: Service, request: Request) -> Response:
    """Return the progress of a recorded command, according to the desired state and the presence of the workers."""
    name = request.path_params["id"]
    found = operation_as_json(await service.rb.fleet.state(), name)
    if found is None:
        message = f"operation {name[:64]!r} is unknown, or older than the last recorded commands"
        raise HttpError(404, message, code="unknown_operation", param="id")
    return json_response(found)


KEY_END: Final = ":"
"""Separates a client's key from the rest of a command's id."""


def key_of(command_id: str) -> str:
    """Return the client's key in the id of a command, or the whole id of a command without one."""
    return command_id.split(KEY_END, maxsplit=1)[0]


def find_recorded(states: Iterable[DesiredState], ids: Collection[str]) -> tuple[AnyCommand, ...]:
    """Return the commands with these ids that registers still hold."""
    found = (recorded.command for state in states for own in state.everywhere for recorded in own.values())
    return tuple(command for command in found if command.id in ids)


def operation_as_json(state: bus.FleetState, name: str) -> JsonObject | None:
    """Return the state of a recorded command as JSON; None: its id or key is unknown."""
    epochs = {
        model: max(found)
        for model, desired in state.desired.items()
        if (found := [seen.epoch for seen in desired.seen if name in (seen.id, key_of(seen.id))])
    }
    if not epochs:
        return None
    ids = {seen.id for model, epoch in epochs.items() for seen in state.desired[model].seen if seen.epoch == epoch}
    commands = find_recorded(map(state.desired.__getitem__, epochs), ids)
    # New weights also record the unload of an adapter.
    command = min(commands, key=lambda each: isinstance(each, UnloadLora), default=None)
    lines = [line for model, epoch in epochs.items() for line in _lines(state, model, command, epoch)]
    return {
        "id": name,
        "operation": None if command is None else command.command,
        "status": _status(line["result"] for line in lines),
        "mode": getattr(command, "mode", None),
        "version": getattr(command, "version", None),
        "inflight_requests": sum(line["in_flight"] for line in lines),
        "epochs": epochs,
        "workers": lines,
    }


def _lines(state: bus.FleetState, model: str, command: AnyCommand | None, epoch: int) -> Iterator[JsonObject]:
    """Yield the progress of each worker of a model to which the command applies.

    If later commands have replaced it everywhere, yield all workers of the model as `stale`, because the desired state
    no longer has the workers of the command.
    """
    silent = SILENT if command is None or isinstance(command, Pause) else SILENT - {WorkerState.FAILED}
    workers = [worker for worker in state.workers if worker.model == model and worker.state not in silent]
    standing = {
        worker.worker
        for worker in workers
        if command is not None
        and (recorded := effective(state.desired[model], worker.worker).get(command.register or "")) is not None
        and recorded.command.id == command.id
    }
    for worker in workers:
        if worker.worker not in standing and standing:
            continue
        result = "stale" if command is None or not standing else _result(worker, command, epoch)
        yield {
            "worker": worker.worker,
            "result": result,
            "state": worker.state,
            "in_flight": worker.in_flight,
            **({"error": worker.last_error} if result == "failed" else {}),
        }


def _result(worker: WorkerPresence, command: AnyCommand, epoch: int) -> str:
    if worker.epoch < epoch:
        return "running"
    match command:
        case Pause():
            # The time expired with requests in flight. The worker accepts no more requests and still finishes these.
            is_failed = bool(worker.in_flight) and command.mode != "keep"
        case UpdateWeights() | FinishWeightUpdate():
            is_failed = worker.weight_version != command.version
        case LoadLora(for_base=True):
            is_failed = worker.base_adapter_version != command.version
        case LoadLora():
            is_failed = (command.name, command.version) not in {(each.name, each.version) for each in worker.loras}
        case _:
            is_failed = False
    return "failed" if is_failed else "applied"


def _status(results: Iterable[str]) -> str:
    """Return the status of the whole command: `running` if any worker is, else `superseded`, else `failed`."""
    counts = Counter(results)
    for result, status in (("running", "running"), ("stale", "superseded"), ("failed", "failed")):
        if counts[result]:
            return status
    return "succeeded" if counts["applied"] else "running"


RANK_OFFSET: Final = "rank_offset"
"""vLLM's key in `init_info`: the rank of a worker's first process among all processes of the transfer."""


class WorldQuery(FleetQuery, frozen=True, kw_only=True):
    """The ranks to count."""

    include_dp: bool = True
    """True: count the ranks of all replicas inside an engine. False: count one replica of each engine."""


class WorkerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one worker. A trainer that is rank 0 adds 1 to `rank_offset`."""

    worker: str
    """Id of the worker."""
    world_size: int
    """Number of ranks of the worker."""
    rank_offset: int
    """Sum of the ranks of all workers before this worker, in the order of their ids."""


async def get_world_size(service: Service, request: Request) -> Response:
    """Return vLLM's world size, the number of ranks with a model's weights, and each worker's number and offset."""
    query = read_query(request, WorldQuery)
    ranks = await _ranks(service, query.model, include_dp=query.include_dp)
    total = sum(each.world_size for each in ranks)
    return json_response({"world_size": total, "engines": len(ranks), "workers": ranks})


async def _ranks(service: Service, model: str | None, *, include_dp: bool = True) -> list[WorkerRanks]:
    """Return the ranks of a model's live workers, in the order of the worker ids.

    Raises:
        HttpError: 400 if `model` is None and the fleet has several models. 503 if there is no live worker, or if a
            worker is starting. 501 if a worker's release does not announce its number of ranks.
    """
    workers = [worker for worker in (await fleet_state(service, model)).workers if worker.state not in DEAD]
    models = sorted({worker.model for worker in workers})
    if not workers:
        raise no_workers("the fleet has no live workers")
    if len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(models)}")
    found: list[WorkerRanks] = []
    offset = 0
    for worker in sorted(workers, key=lambda worker: worker.worker):
        known = worker.capabilities
        if known is None:
            message = f"worker {worker.worker} is starting: its world size is still unknown"
            raise no_workers(message)
        if known.world_size is None:
            message = f"worker {worker.worker} does not announce its world size: its rollbus release is too old"
            raise HttpError(501, message, code="not_served")
        size = known.world_size if include_dp else known.world_size // known.data_parallel_size
        found.append(WorkerRanks(worker=worker.worker, world_size=size, rank_offset=offset))
        offset += size
    return found


async def begin_transfer(
    service: Service, info: JsonObject, *, model: str | None = None, **options: Any
) -> bus.CommandResult:
    """Initialize the engines' transfer of weights.

    If `info` has a `rank_offset` and `options` has no `workers`, each worker gets that offset plus its own offset.

    Raises:
        HttpError: as for `get_world_size`.
        RollbusError: any error of `rollbus.Fleet.init_weight_transfer`.
    """
    fleet = service.rb.fleet
    first = info.get(RANK_OFFSET)
    if isinstance(first, bool) or not isinstance(first, int) or options.get("workers") is not None:
        return await fleet.init_weight_transfer(info, model=model, **options)

    async def begin(ranks: WorkerRanks) -> bus.CommandResult:
        own = {**info, RANK_OFFSET: first + ranks.rank_offset}
        # Each worker has a command of its own.
        own_id = {"id": f"{options['id']}{KEY_END}{ranks.rank_offset}"} if "id" in options else {}
        try:
            sent = {**options, "workers": (ranks.worker,), **own_id}
            return await fleet.init_weight_transfer(own, model=model, **sent)
        except bus.CommandIncomplete as error:
            return error.ledger

    # Send all commands at the same time: no engine becomes ready before all ranks have joined.
    ranks = await _ranks(service, model)
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(begin(each)) for each in ranks]
    result = _merge([task.result() for task in running])
    if not result.is_complete:
        raise bus.CommandIncomplete(result)
    return result


def _merge(results: list[bus.CommandResult]) -> bus.CommandResult:
    """Merge the results of commands that each went to one worker."""

    def of_all(name: str) -> Mapping[str, Any]:
        return {worker: ack for result in results for worker, ack in getattr(result, name).items()}

    seconds = max(result.seconds for result in results)
    return replace(results[0], seconds=seconds, **{name: of_all(name) for name in RESULTS})


class IdQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of which the history is read."""

    id: str
    """Id of the request."""


class FoundRequest(RequestAnswer, frozen=True, kw_only=True):
    """The timelines of a request, and where it waits."""

    waiting: Waiting
    """The request at HTTP services, while no worker has it."""


class FoundRequests(RequestList, frozen=True, kw_only=True):
    """A list of requests."""

    waiting: Waiting
    """The requests at HTTP services that no worker has; only for `show` `running` without `client` and
    `workers`."""


async def request_timelines(service: Service, request: Request) -> Response:
    """Return the history of a request: each attempt with its worker, times, pauses, weight versions and end.

    Workers remember their open requests and the last 1,000 that ended. The id is the value of `X-Request-Id` or the id
    of an OpenAI answer. The query parameter `id` may be any id. A path cannot contain `/`, `.` and `..` as ids.

    A request that no worker has is found at the HTTP service at which it waits.
    """
    name = request.path_params.get("id")
    if name is None:
        name = read_query(request, IdQuery).id
    try:
        trace = await find_timelines(service.rb.fleet, name)
    except InvalidRequest as error:
        raise http_error(error, {"request_id": "id"}) from None
    waiting = await service.services.find("list", None, (name, without_prefix(name)))
    if not trace.timelines and not waiting.requests:
        message = ". ".join(filter(None, (unknown_request(trace), waiting.note)))
        raise HttpError(404, message, code="unknown_request", param="id")
    return json_response(FoundRequest(**msgspec.structs.asdict(answer_of(trace)), waiting=waiting))


async def request_list(service: Service, request: Request) -> Response:
    """Return the requests that run, are slowest, failed or were resumed, by client, model and worker.

    Requests that no worker has are in `waiting`, as far as they came by an HTTP service.
    """
    query = read_query(request, RequestQuery)
    found, waiting = await query.read(service.rb.fleet), Waiting()
    if query.show == "running" and query.workers is None and query.client is None:
        waiting = await service.services.find("list", query.model)
        rest = max(len(waiting.requests) - query.limit, 0)
        waiting = replace(waiting, requests=waiting.requests[: query.limit], left_out=waiting.left_out + rest)
    return json_response(FoundRequests(**msgspec.structs.asdict(found), waiting=waiting))


TIMELINE_ROUTES: Final[RouteTable] = {
    ("GET", "/v1/rl/requests"): HttpRoute(request_timelines, answer=FoundRequest, query=IdQuery),
    ("GET", "/v1/rl/requests/{id}"): HttpRoute(request_timelines, answer=FoundRequest),
    ("GET", "/v1/rl/request_list"): HttpRoute(request_list, answer=FoundRequests, query=RequestQuery),
}
