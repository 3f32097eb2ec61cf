"""Ranks in a transfer of weights: how many processes hold a model's weights, and which ranks are whose."""

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
"""In `init_info`: the rank of a worker's first process among all processes of the transfer, as vLLM calls it."""


class WorldQuery(FleetQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which ranks are counted."""

    include_dp: bool = True
    """Those of all replicas inside an engine; false: those of one replica of each."""


class WorkerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one worker."""

    worker: str
    """Its id."""
    world_size: int
    """How many ranks it has."""
    rank_offset: int
    """The number of ranks of the workers before it, in the order of their ids."""


class WorldSize(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a fleet."""

    world_size: int
    """Of all workers together."""
    engines: int
    """Workers, each with one engine."""
    workers: tuple[WorkerRanks, ...]
    """A trainer that is rank 0 adds 1 to their offsets."""


async def get_world_size(service: Service, request: Request) -> Response:
    """vLLM's: the number of ranks that hold a model's weights; and, for each worker, how many it has after how many."""
    query = read_query(request, WorldQuery)
    ranks = await _ranks(service, query.model, include_dp=query.include_dp)
    total = sum(each.world_size for each in ranks)
    return json_response(WorldSize(world_size=total, engines=len(ranks), workers=tuple(ranks)))


async def _ranks(service: Service, model: str | None, *, include_dp: bool = True) -> list[WorkerRanks]:
    """The ranks of a model's workers, in the order of their ids.

    Raises:
        HttpError: 400, there are several models to choose from; 503, a worker has not said yet how many it has; 501, it
            never does.
    """
    workers = [worker for worker in (await fleet_state(service, model)).workers if worker.state not in DEAD]
    models = sorted({worker.model for worker in workers})
    if not workers:
        raise HttpError(503, "no workers are there", code=ErrorCode.NO_WORKERS)
    if len(models) > 1:
        raise invalid("model", "is missing", f"one of {', '.join(models)}")
    found: list[WorkerRanks] = []
    offset = 0
    for worker in sorted(workers, key=lambda worker: worker.worker):
        known = worker.capabilities
        if known is None:
            message = f"worker {worker.worker} is starting: its world size is not known yet"
            raise HttpError(503, message, code=ErrorCode.NO_WORKERS)
        if known.world_size is None:
            message = f"worker {worker.worker} does not announce its world size: its rollbus is too old"
            raise HttpError(501, message, code="not_served")
        size = known.world_size if include_dp else known.world_size // known.data_parallel_size
        found.append(WorkerRanks(worker=worker.worker, world_size=size, rank_offset=offset))
        offset += size
    return found


async def begin_transfer(
    service: Service, info: dict[str, Any], *, model: str | None = None, **options: Any
) -> bus.CommandResult:
    """Set up the engines' transfer of weights. Where `info` has a `rank_offset` for all workers, each gets its own.

    Raises:
        HttpError: as `get_world_size`. And what `rollbus.Fleet.init_weight_transfer` raises.
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

    # At once: no engine is ready before all ranks have met.
    ranks = await _ranks(service, model)
    with first_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(begin(each)) for each in ranks]
    ledger = _merged([task.result() for task in running])
    if not ledger.is_complete:
        raise bus.CommandIncomplete(ledger)
    return ledger


def _merged(ledgers: list[bus.CommandResult]) -> bus.CommandResult:
    """One ledger of commands that each concerned another worker."""

    def of_all(name: str) -> Mapping[str, Any]:
        return {worker: ack for ledger in ledgers for worker, ack in getattr(ledger, name).items()}

    seconds = max(ledger.seconds for ledger in ledgers)
    return replace(ledgers[0], seconds=seconds, **{name: of_all(name) for name in RESULTS})
