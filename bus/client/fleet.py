"""The fleet as a trainer sees it: live workers, queues, desired state, and commands to workers."""

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, Unpack

from ...schemas import control, limits
from ...schemas.checks import check_bool, check_float, check_int, check_name, check_subject_token, unique_names
from ...schemas.control import AnyCommand, DesiredState, PauseMode
from ...schemas.options import DEFAULT_START_TIMEOUT_S
from ...schemas.presence import WorkerPresence
from ...schemas.request import check_given_id, wire_id
from ...schemas.telemetry import RequestKind
from ...schemas.weights import pop_source, source_of
from ..control.controller import OnAck
from ..control.options import DrainOptions, SendOptions, SourceOptions, UpdateOptions, split_options
from ..control.rolling import restart_one_by_one
from ..protocol.fleet.command_result import CommandIncomplete, CommandResult
from ..protocol.fleet.desired import is_recorded
from ..protocol.fleet.loans import LOAN_S, check_lend, check_return, check_returned
from ..protocol.telemetry.experts import ExpertAnswers
from ..protocol.telemetry.requests import RequestList, RequestTrace, merge_list, merge_timelines
from .fleet_state import FleetState, read_experts, read_fleet_state
from .runtime import Runtime

Path = str | os.PathLike[str]
MAX_COUNT: Final = 1_000_000
"""Upper bound of the worker count that a caller can wait for; no fleet is larger."""
MAX_SETTLE_S: Final = 60.0
"""Upper bound of the wait for workers in `Fleet.state`; progress of longer commands is in their acks."""


class WeightCommands:
    """The part of `Fleet` that changes weights and adapters."""

    def __init__(self, runtime: Runtime) -> None:
        self._thread = runtime.thread
        self._runtime = runtime
        self._watcher = runtime.watcher

    async def check_weights(
        self, path: Path | None = None, *, objects: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Check if the workers can execute `update_weights` with this source. This changes nothing."""
        return await self._send(control.CheckWeights, options, source=source_of(path, objects))

    async def update_weights(
        self, path: Path | None = None, *, version: int, **options: Unpack[UpdateOptions]
    ) -> CommandResult:
        """Replace the weights of all workers of a model together.

        All workers stage the weights before any worker switches to them. Each worker verifies the weights after the
        switch. A worker that fails serves no requests until a later successful update or a restart. If all workers
        fail, the desired state returns to its previous value.

        Args:
            path: folder with a whole checkpoint. On the workers' machines it must be below one of their weight roots.
            version: version of the new weights, higher than the present one. Every token sampled from them has this
                version.

        To verify that the workers compute the same as the trainer, pass `expected_canary`:

            [worker, *_] = (await rb.fleet.state()).workers
            request = rollbus.canary_request(worker.capabilities)
            ids, logprobs = greedy(request.prompt_token_ids, request.sampling.max_tokens)  # the trainer's own model
            canary = rollbus.Canary(token_ids=tuple(ids), logprobs=tuple(logprobs))
            await rb.fleet.update_weights(path, version=7, expected_canary=canary)

        Raises:
            ControlError: also raised if the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = split_options(options)
        source, upload = pop_source(path, fields)
        min_staged = fields.pop("min_staged", None)
        command = control.UpdateWeights(version=version, source=source, **fields)
        update = self._runtime.updates.update_weights(command, upload=upload, on_ack=on_ack, min_staged=min_staged)
        return await self._thread.run(update)

    async def load_lora(
        self,
        name: str,
        path: Path | None = None,
        *,
        version: int | None = None,
        for_base: bool = False,
        **options: Unpack[SourceOptions],
    ) -> CommandResult:
        """Load a LoRA adapter into all workers of a model, or replace the adapter of the same name.

        Args:
            name: name of the adapter in requests.
            path: folder of the adapter. On the workers' machines it must be below one of their weight roots.
            version: version of the adapter. Every token sampled with the adapter has this version. None: one more than
                the recorded version.
            for_base: `name` is the model's own name: requests for the model use the adapter until it is unloaded or the
                weights are replaced. `version` continues the versions of the weights, and `min_weight_version`,
                `max_weight_lag` and `drop_stale` compare with it.

        Raises:
            ControlError: also raised if the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = split_options(options)
        source, upload = pop_source(path, fields)
        command = control.LoadLora(name=name, source=source, version=version or 0, for_base=for_base, **fields)
        loading = self._runtime.updates.load_lora(
            command, is_next_version=version is None, upload=upload, on_ack=on_ack
        )
        return await self._thread.run(loading)

    async def unload_lora(self, name: str, **options: Unpack[SendOptions]) -> CommandResult:
        """Unload a LoRA adapter. Requests in flight that use it end. The client deletes its uploaded files.

        Raises:
            ControlError: `not_found`: no worker has the adapter or should have it. Nothing was recorded.
        """
        return await self._run(self._runtime.updates.unload_lora, control.UnloadLora, options, name=name)

    async def init_weight_transfer(self, info: dict[str, Any], **options: Unpack[SendOptions]) -> CommandResult:
        """Pass `info` to `init_weight_transfer_engine` of the engines."""
        return await self._send(control.InitWeightTransfer, options, info=info)

    async def start_weight_update(self, *, mode: PauseMode = "keep", **options: Unpack[SendOptions]) -> CommandResult:
        """Pause the requests in flight and start an update through the engines' weight transfer engine.

        The transfer belongs to this client. If the client is lost for 20 s, or sends no command for 600 s (an option of
        the worker), the workers end the transfer and load the desired weights again.

        Args:
            mode: handling of the requests in flight, as in `pause`.

        Returns:
            The command result; its `id` is the id of the transfer.
        """
        return await self._run(self._runtime.updates.start_weight_update, control.StartWeightUpdate, options, mode=mode)

    async def update_weight_chunk(
        self, info: dict[str, Any], *, transfer: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Pass `info` to `update_weights` of the engines.

        Args:
            transfer: id of the transfer that must be open. None (default): any of this client.
        """
        return await self._send(control.UpdateWeightChunk, options, info=info, transfer=transfer)

    async def cancel_weight_update(
        self, *, transfer: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """End an open transfer of any owner. The workers load the desired weights again.

        Args:
            transfer: id of the transfer. None (default): whichever is open.

        Raises:
            CommandIncomplete: also if no worker has it open (`transfer_expired`). One worker that has it suffices.
        """
        return await self._send(control.CancelWeightUpdate, options, transfer=transfer)

    async def finish_weight_update(
        self,
        version: int,
        *,
        allow_rollback: bool = False,
        label: str | None = None,
        transfer: str | None = None,
        **options: Unpack[SendOptions],
    ) -> CommandResult:
        """Finish an update through the transfer engine. Workers verify the weights as after `update_weights`.

        A worker that starts later cannot get these weights. It serves no requests until the next update. If the version
        is rejected, the transfer stays open; finish it with another version.

        Args:
            version: version of the new weights, higher than the present one.
            allow_rollback: True: allow an older version, or the version of a checkpoint again. Default: False.
            label: the trainer's name for the version, for example `step-42`.
            transfer: id of the transfer that must be open. None (default): any of this client.

        Raises:
            ControlError: also raised if no worker can finish: `transfer_expired`, `transfer_held`, `transfer_empty`.
        """
        fields = {"version": version, "allow_rollback": allow_rollback, "label": label, "transfer": transfer}
        finish = self._runtime.updates.finish_weight_update
        return await self._run(finish, control.FinishWeightUpdate, options, **fields)

    async def send(self, command: AnyCommand, *, on_ack: OnAck | None = None) -> CommandResult:
        """Send any command of `schemas/control.py`, without upload, earlier checks or later comparison."""
        return await self._thread.run(self._runtime.controller.send(command, on_ack))

    async def _send(self, kind: Callable[..., AnyCommand], options: Mapping[str, Any], **fields: Any) -> CommandResult:
        return await self._run(self._runtime.controller.send, kind, options, **fields)

    async def _run(
        self,
        method: Callable[[Any, OnAck | None], Coroutine[Any, Any, CommandResult]],
        kind: Callable[..., AnyCommand],
        options: Mapping[str, Any],
        **fields: Any,
    ) -> CommandResult:
        common, on_ack = split_options(options)
        return await self._thread.run(method(kind(**fields, **common), on_ack))


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
    """

    def __repr__(self) -> str:
        """Return one line with each worker and its state."""
        workers = (f"{worker.worker}:{worker.state}" for worker in self._watcher.snapshot.workers)
        return f"<Fleet {self._watcher.subjects.fleet} {' '.join(workers) or 'empty'}>"

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
        """Ask all workers for their state. Return the answers of at most the next half second.

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
        return await self._thread.run(self._watcher.check_queues(self._runtime.config.client))

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
        await self._thread.call(self._runtime.pauses.mute_present)

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
        return await self._thread.run(read_experts(self._runtime.controller, model, names, last_s, timeout_s))

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

    async def restart_one_by_one(
        self,
        workers: Iterable[str] | None = None,
        *,
        allow_none: bool = False,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        **options: Unpack[DrainOptions],
    ) -> CommandResult:
        """Restart workers one after another, for example on a new release. Nothing is recorded.

        Each worker hands over its requests and exits with code 0; its supervisor must start it again. The next worker
        follows when this one serves, or is back in the state that it had.

        Args:
            workers: ids of the workers. None (default): all.
            allow_none: also restart a worker while no other one serves its model; requests wait. Default: False.
            start_timeout_s: seconds for each worker to exit and to come back. Default: 1800.

        `CommandIncomplete.ledger` has the workers that are back in `applied`, one that stays away in `late`, and those
        that remain in `missing`.
        """
        common, on_ack = split_options({**options, "workers": workers})
        return await self._thread.run(
            restart_one_by_one(
                self._runtime.controller,
                control.State(**common),
                allow_none=check_bool("allow_none", allow_none),
                start_timeout_s=check_float("start_timeout_s", start_timeout_s, 0, limits.MAX_TIMEOUT_S, above=True),
                on_ack=on_ack,
            )
        )

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

    async def lend(
        self, worker: str, *, for_s: float = LOAN_S, allow_none: bool = False, **options: Unpack[DrainOptions]
    ) -> CommandResult:
        """Let a worker sleep with nothing kept in its GPU's memory, so that another process can use the GPU.

        At the end of the term the worker wakes if the memory is free. Otherwise it sleeps on and tries again each
        minute. While it is lent it stages nothing, and commands that load weights do not wait for it. Lend it again to
        renew the term, which then begins anew.

        Args:
            worker: id of the worker.
            for_s: term in seconds, by the worker's own clock (default: 3600, at most 7 days).
            allow_none: True: it may be the last worker that serves its model. Default: False.

        Raises:
            ControlError: `unsupported`: its engine cannot sleep. `not_serving`: it is the last worker of its model.
                Nothing was recorded.
        """
        is_allowed = check_bool("allow_none", allow_none)
        fields, on_ack = split_options(options)
        for_s = check_float("for_s", for_s, 0, limits.MAX_TIMEOUT_S, above=True)
        command = control.Sleep(level=2, for_s=for_s, workers=unique_names("worker", [worker]), **fields)

        def revise(state: DesiredState, wanted: AnyCommand) -> AnyCommand:
            of_model = [each for each in self.workers if each.model == state.model]
            if not is_recorded(state, wanted):
                check_lend(state, worker, of_model, allow_none=is_allowed)
            return wanted

        return await self._thread.run(self._runtime.controller.send(command, on_ack, revise=revise))

    async def return_worker(self, worker: str, **options: Unpack[DrainOptions]) -> CommandResult:
        """End the loan of a worker. It loads the recorded weights, verifies them, and then serves.

        Raises:
            CommandIncomplete: also if another process still uses its memory. The loan then stays as it was.
            ControlError: `not_found`: the worker is not lent. `not_serving`: it is awake, but does not serve; the
                message has the reason.
        """
        fields, on_ack = split_options({"timeout_s": control.LOAD_TIMEOUT_S, **options})
        command = control.Wake(workers=unique_names("worker", [worker]), **fields)

        def revise(state: DesiredState, wanted: AnyCommand) -> AnyCommand:
            if not is_recorded(state, wanted):
                check_return(state, worker, self.workers)
            return wanted

        result = await self._thread.run(self._runtime.controller.send(command, on_ack, revise=revise))
        check_returned(worker, self.workers)
        return result

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
