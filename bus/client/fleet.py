"""The fleet as a trainer sees it: who lives, what they serve, what waits for them, and commands to them."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, Unpack

import msgspec

from ...schemas import control, limits
from ...schemas.checks import check_bool, check_float, check_int, check_name, describe
from ...schemas.control import AnyCommand, PauseMode, WeightSource
from ...schemas.desired import DesiredState
from ...schemas.errors import BusBroken, InvalidRequest
from ...schemas.presence import WorkerPresence
from ..control.ack_collector import OnAck
from ..protocol.fleet.command_result import CommandResult
from ..protocol.telemetry.expert_answers import ExpertAnswers, merge_answers
from ..protocol.telemetry.request_trace import RequestTrace, merge_timelines
from ..queue.streams import QueueDepth
from .expert_reads import experts_command, read_experts
from .fleet_options import DrainOptions, Path, SendOptions, SourceOptions, UpdateOptions
from .loop_thread import LoopThread
from .runtime import ClientRuntime

__all__ = ["Fleet", "FleetState"]

logger = logging.getLogger(__name__)

MAX_COUNT: Final = 1_000_000
"""Of workers to wait for: none will ever be so many."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    workers: tuple[WorkerPresence, ...]
    """Live workers by id; empty when there are none."""
    queues: tuple[QueueDepth, ...] = ()
    """How much waits for them, by model and lane; empty where the server has no queue for their models."""
    queue_problems: dict[str, str] = {}
    """Why queues do not answer, by model: one without a leader, for example, whose requests stand still."""
    desired: dict[str, DesiredState] = {}
    """What the workers of each model should be doing; without models for which nothing was ever recorded."""


class Fleet:
    """The workers of one fleet. Got from a client that is connected; use it from the client's event loop.

    Commands return a ledger in which all workers that had to answer have applied them. They raise

    - `CommandIncomplete`: not all did; its `ledger` says who, and the message why;
    - `NoWorkers`: nobody is there to carry it out;
    - `InvalidRequest`: a field is wrong, or a worker that was named is not there;
    - `ControlError`: the desired state refuses it, for example an older version of the weights;
    - `RemoteProtocolError`: the desired state cannot be read; `reset` clears it;
    - `BusBroken`: JetStream or the connection failed; `BusClosed`: the client was closed.

    In all cases but the first and the last nothing was changed. Cancelling one leaves what is recorded: the workers
    carry it out all the same.

    Args:
        thread: on which `runtime` lives.
    """

    def __init__(self, name: str, thread: LoopThread[Any], runtime: ClientRuntime) -> None:
        self._name = name
        self._thread = thread
        self._runtime = runtime
        self._watcher = runtime.watcher

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        workers = (f"{worker.worker}:{worker.state}" for worker in self._watcher.snapshot.workers)
        return f"<Fleet {self._name} {' '.join(workers) or 'empty'}>"

    @property
    def workers(self) -> tuple[WorkerPresence, ...]:
        """Live workers by id, as they were last heard; `state` asks them."""
        return self._watcher.snapshot.workers

    @property
    def bad_messages(self) -> int:
        """Announcements and answers of workers that did not decode."""
        return self._watcher.bad_messages + self._runtime.controller.collector.bad_messages

    async def state(self) -> FleetState:
        """Ask all workers for their state and return what was heard within half a second.

        Raises:
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._state())

    async def _state(self) -> FleetState:
        workers, queues, problems = await self._watcher.workers_and_queues()
        try:
            desired = await self._runtime.controller.store.read_all()
        except BusBroken as exc:
            # What workers say of themselves counts all the same.
            logger.warning("fleet.no_desired_states error=%s", exc)
            desired = {}
        return FleetState(fleet=self._name, workers=workers, queues=queues, queue_problems=problems, desired=desired)

    async def paused_since(self, model: str) -> datetime | None:
        """Return when the last of a model's workers was told to pause, by the clock of the NATS server.

        None if none is paused, or it is not known any more: NATS keeps the last 64 states of each model, and a user may
        lack the permission to read them.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.pauses.paused_since(check_name("model", model)))

    async def mute_pause(self) -> None:
        """Log no `client.waiting` for a pause of now: the caller has said it.

        Raises:
            BusClosed: the client was closed.
        """
        await self._thread.run(self._runtime.pauses.mute_present())

    async def reset(self, model: str | None = None) -> tuple[str, ...]:
        """Clear what is desired of the workers of `model`, or of all models of the fleet, also where it is unreadable.

        Workers that start afterwards serve what they are started with. Of those that live, none changes its weights.

        Returns:
            The models that something was recorded for, sorted.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._reset(model))

    async def _reset(self, model: str | None) -> tuple[str, ...]:
        store = self._runtime.controller.store
        models = await store.models() if model is None else (check_name("model", model),)
        return tuple([name for name in models if await store.reset(name)])

    async def wait_for_workers(self, count: int = 1, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        """Wait until at least `count` workers serve `model` (or any); those that are paused or updating don't count.

        Raises:
            NoWorkers: fewer did within `timeout_s` seconds; the message says what they were doing.
            BusBroken: the connection to NATS is gone.
            BusClosed: the client was closed.
        """
        count = check_int("count", count, 0, MAX_COUNT)
        timeout_s = check_float("timeout_s", timeout_s, 0, limits.MAX_TIMEOUT_S)
        model = None if model is None else check_name("model", model)
        await self._thread.run(self._watcher.wait_for_workers(count, model, timeout_s))

    async def send(self, command: AnyCommand, *, on_ack: OnAck | None = None) -> CommandResult:
        """Carry out any command of `schemas/control.py`; nothing is uploaded, checked before or compared afterwards."""
        return await self._thread.run(self._runtime.controller.send(command, on_ack))

    async def timelines(
        self, request_id: str, *, model: str | None = None, timeout_s: float = control.READ_TIMEOUT_S
    ) -> RequestTrace:
        """Ask the workers what became of a request, of whichever client; for admins and frontends.

        A worker remembers its requests in flight and the last 1,000 that ended there, until it is stopped. What became
        of a request at a lost worker shows only in the attempts that followed.

        Args:
            request_id: as its client named it.
            model: whose workers are asked; None: those of every model.
            timeout_s: for all of them to answer; those that do not are named.

        Raises:
            ControlError: `not_allowed`, these credentials may not ask.
            NoWorkers, InvalidRequest, BusBroken, BusClosed: as commands.
        """
        command = control.ReadRequest(request_id=request_id, model=model, timeout_s=timeout_s)
        return merge_timelines(request_id, await self._thread.run(self._runtime.controller.read(command)))

    async def experts(
        self,
        model: str | None = None,
        *,
        workers: Iterable[str] | None = None,
        last_s: float | None = 60.0,
        timeout_s: float = control.READ_TIMEOUT_S,
    ) -> ExpertAnswers:
        """Ask the workers of a model how often their routers chose each expert; for admins and frontends.

        Args:
            model: may be None where the fleet has only one.
            workers: which of them are asked, up to 64; None: all, or a sample of 64.
            last_s: what is asked for: whole intervals of 5 s that cover the last so many seconds, up to two minutes.
                None: everything, of the last 8 versions of the weights.
            timeout_s: for all of them to answer; those that do not are named.

        Raises:
            ControlError: `not_allowed`, these credentials may not ask.
            NoWorkers, InvalidRequest, BusBroken, BusClosed: as commands.
        """
        names = None if workers is None else _names("workers", workers)
        command = experts_command(model, names, last_s, timeout_s)
        heard = await self._thread.run(read_experts(self._runtime.controller, command))
        # Adding up takes a hundredth of a second for many workers of a large model.
        return await asyncio.to_thread(merge_answers, **heard._asdict())

    async def pause(
        self, *, mode: PauseMode = "keep", clear_cache: bool = False, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Have workers take no more requests.

        Args:
            mode: what becomes of those in flight. `keep`: they stand still until the resume; `wait`: they are
                finished first, a worker that cannot within the time stays paused and fails; `abort`: they end.
            clear_cache: forget the prefix cache too.
        """
        return await self._send(control.Pause, options, mode=mode, clear_cache=clear_cache)

    async def resume(self, **options: Unpack[SendOptions]) -> CommandResult:
        """Undo `pause` and `drain`."""
        return await self._send(control.Resume, options)

    async def drain(self, workers: Iterable[str], **options: Unpack[DrainOptions]) -> CommandResult:
        """Have these workers hand their requests to others and take no more, until `resume`."""
        return await self._send(control.Drain, options, workers=_names("workers", workers))

    async def flush_cache(self, *, preempt: bool = False, **options: Unpack[SendOptions]) -> CommandResult:
        """Forget the prefix cache.

        Args:
            preempt: also what requests in flight have cached, which are then computed anew; else those make it fail.
        """
        return await self._send(control.FlushCache, options, preempt=preempt)

    async def sleep(self, level: Literal[1, 2] = 1, **options: Unpack[SendOptions]) -> CommandResult:
        """Have idle engines give up their memory; level 1 keeps the weights in the machine's, level 2 drops them."""
        return await self._send(control.Sleep, options, level=level)

    async def wake(self, **options: Unpack[SendOptions]) -> CommandResult:
        """Undo `sleep`."""
        return await self._send(control.Wake, options)

    async def abort(self, request_ids: Iterable[str], **options: Unpack[SendOptions]) -> CommandResult:
        """End requests in flight, of whichever client; not those that wait in the queue.

        `Ack.request_ids` says which of them a worker had, and `CommandResult.not_found` which none had. That is an
        error, `CommandIncomplete`, if no worker had any of them.
        """
        return await self._send(control.Abort, options, request_ids=_names("request_ids", request_ids))

    async def check_weights(
        self, path: Path | None = None, *, objects: str | None = None, **options: Unpack[SendOptions]
    ) -> CommandResult:
        """Have workers say whether `update_weights` with this source could be carried out; nothing is touched."""
        return await self._send(control.CheckWeights, options, source=_source(path, objects))

    async def update_weights(
        self, path: Path | None = None, *, version: int, **options: Unpack[UpdateOptions]
    ) -> CommandResult:
        """Replace the weights of all workers of a model, as one: staged by all before any changes, proven after it.

        A worker that fails serves nothing until a later good update or a restart. If all fail, what is desired is set
        back to what it was before.

        Args:
            path: of a folder with a whole checkpoint; the workers must have it below one of their weight roots.
            version: of the new weights, which every token sampled from them bears; higher than the present one.

        To have the workers prove that they compute what the trainer does, give them `expected_canary`:

            [worker, *_] = (await rb.fleet.state()).workers
            request = rollbus.canary_request(worker.capabilities)
            ids, logprobs = greedy(request.prompt_token_ids, request.sampling.max_tokens)  # the trainer's own model
            canary = rollbus.Canary(token_ids=tuple(ids), logprobs=tuple(logprobs))
            await rb.fleet.update_weights(path, version=7, expected_canary=canary)

        Raises:
            ControlError: also where the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = _split(options)
        source, upload = _pop_source(path, fields)
        min_staged = fields.pop("min_staged", None)
        command = control.UpdateWeights(version=version, source=source, **fields)
        update = self._runtime.updates.update_weights(command, upload=upload, on_ack=on_ack, min_staged=min_staged)
        return await self._thread.run(update)

    async def load_lora(
        self, name: str, path: Path | None = None, *, version: int | None = None, **options: Unpack[SourceOptions]
    ) -> CommandResult:
        """Load a LoRA adapter into all workers of a model, or replace the one of the same name.

        Args:
            name: what requests call it.
            path: of its folder; the workers must have it below one of their weight roots.
            version: of the adapter, which every token sampled with it bears; None: one more than what is recorded.

        Raises:
            ControlError: also where the folder could not be uploaded. Nothing was changed.
        """
        fields, on_ack = _split(options)
        source, upload = _pop_source(path, fields)
        command = control.LoadLora(name=name, source=source, version=version or 0, **fields)
        loading = self._runtime.updates.load_lora(
            command, is_next_version=version is None, upload=upload, on_ack=on_ack
        )
        return await self._thread.run(loading)

    async def unload_lora(self, name: str, **options: Unpack[SendOptions]) -> CommandResult:
        """Unload a LoRA adapter; one that is not there is fine. Requests in flight that use it are ended.

        What was uploaded for it is deleted.
        """
        fields, on_ack = _split(options)
        command = control.UnloadLora(name=name, **fields)
        return await self._thread.run(self._runtime.updates.unload_lora(command, on_ack))

    async def init_weight_transfer(self, info: dict[str, Any], **options: Unpack[SendOptions]) -> CommandResult:
        """Pass `info` to the engines' `init_weight_transfer_engine`."""
        return await self._send(control.InitWeightTransfer, options, info=info)

    async def start_weight_update(self, *, mode: PauseMode = "keep", **options: Unpack[SendOptions]) -> CommandResult:
        """Hold the requests in flight and begin to take weights from the engines' transfer engine."""
        return await self._send(control.StartWeightUpdate, options, mode=mode)

    async def update_weight_chunk(self, info: dict[str, Any], **options: Unpack[SendOptions]) -> CommandResult:
        """Pass `info` to the engines' `update_weights`."""
        return await self._send(control.UpdateWeightChunk, options, info=info)

    async def finish_weight_update(
        self,
        version: int,
        *,
        allow_rollback: bool = False,
        label: str | None = None,
        **options: Unpack[SendOptions],
    ) -> CommandResult:
        """End an update by the transfer engine: verified, compared and stamped as after `update_weights`.

        A worker that starts later cannot get these weights, and serves nothing until the next update. Where the version
        is refused, as by `update_weights`, the transfer stays open, to be ended with another. `label` is what the
        trainer calls the version, for example `step-42`.
        """
        fields, on_ack = _split(options)
        command = control.FinishWeightUpdate(version=version, allow_rollback=allow_rollback, label=label, **fields)
        return await self._thread.run(self._runtime.updates.finish_weight_update(command, on_ack))

    async def _send(self, kind: Callable[..., AnyCommand], options: Mapping[str, Any], **fields: Any) -> CommandResult:
        common, on_ack = _split(options)
        return await self.send(kind(**fields, **common), on_ack=on_ack)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], OnAck | None]:
    """The fields of a command among `options`, and who hears of answers."""
    fields = dict(options)
    on_ack = fields.pop("on_ack", None)
    if on_ack is not None and not callable(on_ack):
        raise InvalidRequest(field="on_ack", problem=f"is {describe(on_ack)}", allowed="a function, or None")
    if fields.get("workers") is not None:
        fields["workers"] = _names("workers", fields["workers"])
    return fields, on_ack


def _pop_source(path: Path | None, fields: dict[str, Any]) -> tuple[WeightSource, bool]:
    """The source, and whether it is to be uploaded; what says so is taken out of `fields`."""
    objects = fields.pop("objects", None)
    upload = check_bool("upload", fields.pop("upload", False))
    source = _source(path, objects)
    if upload and source.path is None:
        raise InvalidRequest(field="upload", problem="is set, and there is no path", allowed="a path, or no upload")
    return source, upload


def _source(path: object, objects: str | None) -> WeightSource:
    if path is None:
        return WeightSource(objects=objects)
    folder: object = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise InvalidRequest(field="path", problem=f"is {describe(path)}", allowed="the path of a folder")
    return WeightSource(path=folder, objects=objects)


def _names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    """These names once each; one string would be taken for its letters."""
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidRequest(field=field, problem=f"is {describe(names)}", allowed="a list of ids")
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequest(field=field, problem=f"has {describe(name)}", allowed="a list of ids")
        found[name] = None
    return tuple(found)
