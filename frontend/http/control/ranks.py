"""Ranks in a transfer of weights: the number of processes with a model's weights, and the ranks of each worker."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....bus.protocol.fleet.command_result import RESULTS
from ....schemas.errors import ErrorCode
from ..calls import first_error
from ..errors import HttpError, invalid
from ..service import Service
from ..status import json_response
from .reading import read_query
from .reads import DEAD, FleetQuery, fleet_state

__all__ = ["WorldQuery", "begin_transfer", "get_world_size"]

RANK_OFFSET: Final = "rank_offset"
"""vLLM's key in `init_info`: the rank of a worker's first process among all processes of the transfer."""


class WorldQuery(FleetQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks to count."""

    include_dp: bool = True
    """True: count the ranks of all replicas inside an engine. False: count one replica of each engine."""


class WorkerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one worker."""

    worker: str
    """Id of the worker."""
    world_size: int
    """Number of ranks of the worker."""
    rank_offset: int
    """Sum of the ranks of all workers before this worker, in the order of their ids."""


class WorldSize(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a fleet."""

    world_size: int
    """Number of ranks of all workers together."""
    engines: int
    """Number of workers; each worker has one engine."""
    workers: tuple[WorkerRanks, ...]
    """The ranks of each worker. If the trainer is rank 0, it adds 1 to each `rank_offset`."""


async def get_world_size(service: Service, request: Request) -> Response:
    """Return vLLM's world size, the number of ranks with a model's weights, and each worker's number and offset."""
    query = read_query(request, WorldQuery)
    ranks = await _ranks(service, query.model, include_dp=query.include_dp)
    total = sum(each.world_size for each in ranks)
    return json_response(WorldSize(world_size=total, engines=len(ranks), workers=tuple(ranks)))


async def _ranks(service: Service, model: str | None, *, include_dp: bool = True) -> list[WorkerRanks]:
    """Return the ranks of a model's live workers, in the order of the worker ids.

    Raises:
        HttpError: 400 if `model` is None and the fleet has several models. 503 if there is no live worker, or if a
            worker is starting. 501 if a worker's release does not announce its number of ranks.
    """
    workers = [worker for worker in (await fleet_state(service, model)).workers if worker.state not in DEAD]
    models = sorted({worker.model for worker in workers})
    if not workers:
        raise HttpError(503, "the fleet has no live workers", code=ErrorCode.NO_WORKERS)
    if len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(models)}")
    found: list[WorkerRanks] = []
    offset = 0
    for worker in sorted(workers, key=lambda worker: worker.worker):
        known = worker.capabilities
        if known is None:
            message = f"worker {worker.worker} is starting: its world size is still unknown"
            raise HttpError(503, message, code=ErrorCode.NO_WORKERS)
        if known.world_size is None:
            message = f"worker {worker.worker} does not announce its world size: its rollbus release is too old"
            raise HttpError(501, message, code="not_served")
        size = known.world_size if include_dp else known.world_size // known.data_parallel_size
        found.append(WorkerRanks(worker=worker.worker, world_size=size, rank_offset=offset))
        offset += size
    return found


async def begin_transfer(
    service: Service, info: dict[str, Any], *, model: str | None = None, **options: Any
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
        try:
            return await fleet.init_weight_transfer(own, model=model, **{**options, "workers": (ranks.worker,)})
        except bus.CommandIncomplete as error:
            return error.ledger

    # Send all commands at the same time: no engine becomes ready before all ranks have joined.
    ranks = await _ranks(service, model)
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(begin(each)) for each in ranks]
    ledger = _merged([task.result() for task in running])
    if not ledger.is_complete:
        raise bus.CommandIncomplete(ledger)
    return ledger


def _merged(ledgers: list[bus.CommandResult]) -> bus.CommandResult:
    """Merge the results of commands that each went to one worker."""

    def of_all(name: str) -> Mapping[str, Any]:
        return {worker: ack for ledger in ledgers for worker, ack in getattr(ledger, name).items()}

    seconds = max(ledger.seconds for ledger in ledgers)
    return replace(ledgers[0], seconds=seconds, **{name: of_all(name) for name in RESULTS})
