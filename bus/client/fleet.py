"""The fleet as a trainer sees it: live workers, queues, desired state, and commands to workers."""

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Literal, Unpack

from ...schemas import control, limits
from ...schemas.checks import check_float, check_int, check_name, check_subject_token
from ...schemas.control import PauseMode
from ...schemas.presence import WorkerPresence
from ...schemas.request_ids import check_given_id, wire_id
from ...schemas.telemetry import RequestKind
from ..protocol.fleet.command_result import CommandIncomplete, CommandResult
from ..protocol.telemetry.expert_answers import ExpertAnswers, merge_answers
from ..protocol.telemetry.request_trace import RequestList, RequestTrace, merge_list, merge_timelines
from .expert_reads import experts_command, read_experts
from .fleet_options import DrainOptions, SendOptions, unique_names
from .fleet_state import FleetState, read_fleet_state
from .loop_thread import LoopThread
from .runtime import ClientRuntime
from .weight_commands import WeightCommands

__all__ = ["Fleet", "FleetState"]

MAX_COUNT: Final = 1_000_000
"""Upper bound of the worker count that a caller can wait for; no fleet is larger."""


MAX_SETTLE_S: Final = 60.0
"""Upper bound of the wait for workers in `Fleet.state`; progress of longer commands is in their acks."""


class Fleet(WeightCommands):
    """The workers of one fleet. Use it from the client's event loop; `Client.fleet` returns it.

    A command returns a `CommandResult` after all workers that had to answer have applied the command, and their
    presence shows it, so that the next call of this client sees it. Commands raise

    - `CommandIncomplete`: not all workers applied it. The error's `ledger` lists the workers, its message the reasons.
    - `NoWorkers`: no worker can execute it.
    - `InvalidRequest`: a field is wrong, or a named worker is not live.
    - `ControlError`: the desired state rejects it, for example because the version of the weights is too old.
    - `RemoteProtocolError`: the desired state cannot be decoded. `reset` clears it.
    - `BusBroken`: JetStream or the connection failed.
    - `BusClosed`: the client was closed.

    After `NoWorkers`, `InvalidRequest`, `ControlError` and `RemoteProtocolError` nothing was changed. If the caller
    cancels a command, the recorded part stays recorded, and the workers still execute it.

    Args:
        thread: thread on which `runtime` runs.
    """

    def __init__(self, name: str, thread: LoopThread[Any], runtime: ClientRuntime) -> None:
        super().__init__(thread, runtime)
        self._name = name
        self._watcher = runtime.watcher

    def __repr__(self) -> str:
        """Return one line with each worker and its state."""
        workers = (f"{worker.worker}:{worker.state}" for worker in self._watcher.snapshot.workers)
        return f"<Fleet {self._name} {' '.join(workers) or 'empty'}>"

    @property
    def workers(self) -> tuple[WorkerPresence, ...]:
        """Live workers sorted by id, with their current states, versions and adapters.

        Load, counters and times may be old: `state` asks the workers for them.
        """
        return self._watcher.snapshot.workers

    @property
    def bad_messages(self) -> int:
        """Number of presence messages and acks of workers that could not be decoded."""
        return self._watcher.rejected.so_far + self._runtime.controller.collector.rejected.so_far

    async def state(self, *, settle_s: float = 0.0) -> FleetState:
        """Ask all workers for their state. Return the answers of the next half second.

        Args:
            settle_s: further seconds to wait, at most, until `FleetState.stale` is empty: until all workers have
                handled the commands that are recorded for them. Default: 0.

        Raises:
            InvalidRequest: `settle_s` is not 0 to 60.
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        return await self._thread.run(
            read_fleet_state(self._runtime, check_float("settle_s", settle_s, 0, MAX_SETTLE_S))
        )

    async def check_queues(self) -> dict[str, str]:
        """Return the models whose queue confirms no request, each with the reason. Publish a probe to each queue.

        A viewer gets no reasons.

        Raises:
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._check_queues())

    async def _check_queues(self) -> dict[str, str]:
        return await self._watcher.check_queues(self._runtime.client)

    async def paused_since(self, model: str) -> datetime | None:
        """Return the time of the last command that pauses a worker of `model`, by the clock of the NATS server.

        Return None if no worker is paused, or if the time is unknown. NATS keeps the last 64 states of each model, and
        a user may lack the permission to read them.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.pauses.paused_since(check_name("model", model)))

    async def mute_pause(self) -> None:
        """Suppress the `client.pause_detected` warning for present pauses. For callers that report the pause.

        Raises:
            BusClosed: the client was closed.
        """
        await self._thread.run(self._runtime.pauses.mute_present())

    async def reset(self, model: str | None = None) -> tuple[str, ...]:
        """Clear the desired state of `model`, or of all models of the fleet. This works also if it cannot be decoded.

        Workers that start later serve the weights that they are started with. Running workers keep their weights.

        Returns:
            Models that had a desired state, sorted.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.models.reset(model))

    async def known_models(self) -> tuple[str, ...]:
        """Return the models of live workers and of stored desired states, sorted. Some may have no workers.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.models.known())

    async def models_with_adapter(self, name: str) -> tuple[str, ...]:
        """Return the models for which an adapter of this name is recorded, sorted. They may have no workers.

        Wait up to a second until presence shows it on a worker. All calls together read at most once a second.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.models.with_adapter(name))

    async def forget_model(self, model: str) -> bool:
        """Delete the queue and the desired state of a model without workers. For administrators.

        Returns:
            True if the model was known.

        Raises:
            InvalidRequest: the model has workers, or its queue has requests. Nothing was deleted.
            BusBroken: JetStream or the connection failed, or this user has no permission.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.models.forget(model))

    async def wait_for_workers(self, count: int = 1, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        """Wait until at least `count` workers serve `model`, or any model if it is None.

        Workers that are paused or updating do not count.

        Raises:
            NoWorkers: fewer workers served the model within `timeout_s` seconds. The message gives their states.
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        count = check_int("count", count, 0, MAX_COUNT)
        timeout_s = check_float("timeout_s", timeout_s, 0, limits.MAX_TIMEOUT_S)
        model = None if model is None else check_name("model", model)
        await self._thread.run(self._watcher.wait_for_workers(count, model, timeout_s))

    async def timelines(
        self, request_id: str, *, model: str | None = None, timeout_s: float = control.READ_TIMEOUT_S
    ) -> RequestTrace:
        """Ask the workers for the timeline of a request of any client.

        Trainers and publishers read only their own requests, and viewers none.

        Each worker stores its requests in flight and its last 1,000 ended requests until the worker stops. The timeline
        of a request at a lost worker is lost. Only its later attempts appear.

        Args:
            request_id: id that the request's client gave it.
            model: model whose workers are asked. None: workers of all models.
            timeout_s: seconds for all workers to answer (default: 5). The result names the workers that do not answer.

        Raises:
            ControlError: `not_allowed`, the credentials do not permit the question.
            NoWorkers, InvalidRequest, BusBroken, BusClosed: as for commands.
        """
        name = wire_id(check_given_id("request_id", request_id))
        command = control.ReadRequest(request_id=name, model=model, timeout_s=timeout_s)
        return merge_timelines(request_id, await self._thread.run(self._runtime.controller.read(command)))

    async def requests(
        self,
        show: RequestKind = "running",
        *,
        client: str | None = None,
        model: str | None = None,
        workers: Iterable[str] | None = None,
        limit: int = 20,
    ) -> RequestList:
        """Ask the workers for a list of requests of all clients.

        Trainers and publishers read only their own requests, and viewers none.

        Requests that wait in the queue are at no worker and in no list. The histories are as in `timelines`.

        Args:
            show: `running`: in flight, the longest time without a token first. `slowest`: in flight or ended, the
                longest first. `failed` or `resumed`: the last first.
            client: name of a client; None: requests of all clients.
            model: name of a model; None: requests for all models.
            workers: ids of workers; None: requests at all workers.
            limit: maximum number of requests, 1 to 256.

        Raises:
            ControlError, NoWorkers, InvalidRequest, BusBroken, BusClosed: as for `timelines`.
        """
        command = control.ReadRequest(
            show=show,
            client=None if client is None else check_subject_token("client", client),
            model=model,
            workers=None if workers is None else unique_names("workers", workers),
            limit=check_int("limit", limit, 1, limits.MAX_TIMELINES),
        )
        return merge_list(show, limit, await self._thread.run(self._runtime.controller.read(command)))

    async def experts(
        self,
        model: str | None = None,
        *,
        workers: Iterable[str] | None = None,
        last_s: float | None = 60.0,
        timeout_s: float = control.READ_TIMEOUT_S,
    ) -> ExpertAnswers:
        """Ask the workers of a model how often their routers chose each expert.

        Args:
            model: name of the model. It may be None if the fleet has only one model.
            workers: ids of the workers to ask, at most 64. None: all workers, or a sample of 64.
            last_s: length of the requested period in seconds, at most two minutes (default: 60). Workers count in
                intervals of 5 s; the result has the whole intervals that cover the period. None: all counts of the last
                8 weight versions.
            timeout_s: seconds for all workers to answer (default: 5). The result names the workers that do not answer.

        Raises:
            ControlError: `not_allowed`, the credentials do not permit the question.
            NoWorkers, InvalidRequest, BusBroken, BusClosed: as for commands.
        """
        names = None if workers is None else unique_names("workers", workers)
        command = experts_command(model, names, last_s, timeout_s)
        heard = await self._thread.run(read_experts(self._runtime.controller, command))
        # Merging takes about 10 ms for many workers of a large model, so it runs on another thread.
        return await asyncio.to_thread(merge_answers, **heard._asdict())

    async def pause(
        self, *, mode: PauseMode = "keep", clear_cache: bool = False, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Pause workers: they accept no more requests until `resume`.

        Args:
            mode: handling of requests in flight. `keep` (default): they pause until the resume. `wait`: they finish
                first; a worker that does not finish them within `timeout_s` stays paused, and the command fails there.
                `abort`: they end.
            clear_cache: True: reset the prefix cache too. Default: False.
        """
        return await self._send(control.Pause, options, mode=mode, clear_cache=clear_cache)

    async def resume(self, **options: Unpack[SendOptions]) -> CommandResult:
        """Resume workers after `pause` or `drain`."""
        return await self._send(control.Resume, options)

    async def drain(self, workers: Iterable[str], **options: Unpack[DrainOptions]) -> CommandResult:
        """Make these workers hand their requests to other workers and accept no more until `resume`."""
        return await self._send(control.Drain, options, workers=unique_names("workers", workers))

    async def flush_cache(self, *, preempt: bool = False, **options: Unpack[SendOptions]) -> CommandResult:
        """Reset the prefix cache.

        Args:
            preempt: True: reset also the blocks that requests in flight use; the engine then computes them again. False
                (default): the command fails if requests in flight use the cache.
        """
        return await self._send(control.FlushCache, options, preempt=preempt)

    async def sleep(self, level: Literal[1, 2] = 1, **options: Unpack[SendOptions]) -> CommandResult:
        """Free the memory of idle engines. Level 1 keeps the weights in host memory; level 2 discards them."""
        return await self._send(control.Sleep, options, level=level)

    async def wake(self, **options: Unpack[SendOptions]) -> CommandResult:
        """Wake engines after `sleep`."""
        return await self._send(control.Wake, options)

    async def abort(self, request_ids: Iterable[str] | None, **options: Unpack[SendOptions]) -> CommandResult:
        """Abort requests in flight of any client. Requests that wait in the queue are not affected.

        Args:
            request_ids: ids of the requests, chosen by their clients. None: all requests in flight.

        `Ack.request_ids` lists the requests that a worker had. `CommandResult.not_found` lists the requests that no
        worker had. If no worker had any of them, this method raises `CommandIncomplete`.
        """
        if request_ids is None:
            return await self._send(control.Abort, options, request_ids=None)
        given = {
            wire_id(check_given_id("request_ids", name)): name for name in unique_names("request_ids", request_ids)
        }
        try:
            result = await self._send(control.Abort, options, request_ids=tuple(given))
        except CommandIncomplete as error:
            raise CommandIncomplete(error.ledger.with_ids(given), error.note) from None
        return result.with_ids(given)
