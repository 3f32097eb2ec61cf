"""Loads weights and adapters into a fleet: upload, check, record, apply, compare."""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from msgspec import structs

from ...schemas.acks import AckError, AckStatus
from ...schemas.checks import check_int
from ...schemas.control import (
    AnyCommand,
    CancelWeightUpdate,
    CheckWeights,
    DesiredState,
    Fence,
    FinishWeightUpdate,
    LoadLora,
    StartWeightUpdate,
    UnloadLora,
    UpdateWeights,
)
from ...schemas.errors import BusBroken, ControlCode, ControlError, InvalidRequest, NoWorkers, RollbusError
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import WeightSource
from ..nats.connection import connected
from ..nats.server import Server
from ..objects.catalog import set_bucket_bytes
from ..objects.uploads import Uploads, sources_in
from ..protocol.fleet import desired
from ..protocol.fleet.authority import Load, pin
from ..protocol.fleet.canary import check_expected, dissenters
from ..protocol.fleet.command_result import CommandIncomplete, CommandResult, Quorum, Roster
from ..protocol.fleet.desired import check_started
from ..protocol.fleet.leases import check_any_can_finish
from ..queue.streams import ensure_queue, set_limits
from ..subjects import Subjects, published_bucket
from .controller import CommandOutcome, Controller, OnAck, Revise, check_command
from .session_bucket import ensure_session_bucket
from .store import DesiredStore

logger = logging.getLogger(__name__)


FENCE_TIMEOUT_S: Final = 10.0
"""Seconds for a worker to stop serving, which requires only the receipt of the command."""


class Updates:
    """Changes of the weights and adapters of a fleet's workers. Each method raises the errors of `Controller.send`."""

    def __init__(self, controller: Controller, uploads: Uploads) -> None:
        self._controller = controller
        self._uploads = uploads

    async def update_weights(
        self, command: UpdateWeights, *, upload: bool, on_ack: OnAck | None, min_staged: int | None = None
    ) -> CommandResult:
        """Replace the weights of all workers of a model, or of the workers that `command` names.

        Every worker first stages and checks the source. If a worker rejects it, or workers find different content,
        nothing changes. Then the command is recorded with the digest of that content, and each worker loads the
        weights. Afterwards the canaries are compared. Workers that differ from the majority of the workers with their
        dtype are fenced, and count as failed.

        Args:
            min_staged: number of workers that must have staged the source before the command is recorded. The other
                workers serve nothing until they have it. None: all workers.
            upload: the source's path is on this machine; upload it to the object store, from which the workers read it.

        Cancellation: before the recording, nothing changes; after it, the workers continue.

        Raises:
            CommandIncomplete: not all workers have the new weights; its note describes the resulting state.
        """
        command = check_command(command)
        roster = await self._controller.roster(command)
        self._controller.check_allowed(command, roster)
        [model] = roster
        await self._check_update(model, command, roster, min_staged)
        async with self._source(model, command, upload) as ready:
            check, quorum = await self._check(ready, roster, on_ack, min_staged)
            pinned, warnings = pin(ready, check.result.applied, await self._controller.without("weight_digests", model))
            warnings += await self._warn_of_history(model, pinned)
            outcome = await self._controller.execute(pinned, roster, on_ack, lost=check.lost, quorum=quorum)
            result = await self._conclude(_with_warnings(outcome, warnings), roster)
        if upload:
            await self._prune(model, ready, outcome)
        return result

    async def start_weight_update(self, command: StartWeightUpdate, on_ack: OnAck | None) -> CommandResult:
        """Begin a transfer. If another owner holds some of the workers, cancel this transfer on the others."""
        command = check_command(command)
        roster = await self._controller.roster(command)
        outcome = await self._controller.execute(command, roster, on_ack)
        applied = tuple(outcome.result.applied)
        errors = [ack.error for ack in outcome.result.failed.values()]
        if applied and any(error and error.code is ControlCode.TRANSFER_HELD for error in errors):
            # A publisher may not cancel. Its lease ends the transfer.
            with suppress(ControlError):
                cancel = CancelWeightUpdate(transfer=command.id, workers=applied)
                await self._controller.execute(cancel, _only(roster, applied), None)
        return await self._controller.conclude(outcome)

    async def finish_weight_update(self, command: FinishWeightUpdate, on_ack: OnAck | None) -> CommandResult:
        """End an update by the engines' own transfer, and compare the canaries as after `update_weights`.

        A rejected version leaves the transfer open. Another version can end it.

        Raises:
            ControlError: no worker can apply it (`transfer_expired`, `transfer_held`, `transfer_empty`).
        """
        command = check_command(command)
        by = command.by or self._controller.name
        roster = await self._controller.roster(command)
        try:
            check_any_can_finish(chain(*roster.values()), command, by)
        except ControlError:
            # Presence may be older than the last ack.
            roster = await self._controller.roster(command, is_fresh=True)
            check_any_can_finish(chain(*roster.values()), command, by)
        return await self._conclude(await self._controller.execute(command, roster, on_ack), roster)

    async def load_lora(
        self, command: LoadLora, *, is_next_version: bool, upload: bool, on_ack: OnAck | None
    ) -> CommandResult:
        """Load an adapter, or replace the adapter with the same name.

        The command is recorded with the digest of the content that workers find at the source. Workers that cannot
        stage the source do not prevent that: they fail to load it.

        Args:
            is_next_version: ignore `command.version` and use the version after the recorded version.
            upload: as in `update_weights`.
        """
        command = check_command(command)
        roster = await self._controller.roster(command)
        self._controller.check_allowed(command, roster)
        [model] = roster
        await self._check_name(command, model)
        if command.for_base and is_next_version:
            raise InvalidRequest("version", "is missing", "a number with for_base")
        if command.for_base:
            check_started(await self.state(model), roster[model], command)
        revise: Revise | None = None
        if is_next_version:
            # For the upload's name. The compare-and-set decides the recorded version, because it differs for each
            # controller.
            command = _at_next_version(await self.state(model), command)
            revise = _revise_version
        async with self._source(model, command, upload) as ready:
            pinned, warnings, lost = await self._pin_adapter(model, ready, roster, on_ack)
            outcome = await self._controller.execute(pinned, roster, on_ack, revise=revise, lost=lost)
            result = await self._controller.conclude(_with_warnings(outcome, warnings))
        if upload:
            await self._prune(model, ready, outcome)
        return result

    async def _pin_adapter(
        self, model: str, command: LoadLora, roster: Roster, on_ack: OnAck | None
    ) -> tuple[LoadLora, tuple[str, ...], dict[str, str]]:
        """Return the command with the digest of the adapter, warnings, and the workers that ended meanwhile."""
        unable = await self._controller.without("weight_digests", model)
        if unable:
            return *pin(command, {}, unable), {}
        outcome = await self._controller.execute(_check_of(command), roster, on_ack)
        return *pin(command, outcome.result.applied, ()), outcome.lost

    async def _warn_of_history(self, model: str, command: UpdateWeights) -> tuple[str, ...]:
        """Return a warning for each other digest that the bucket's history has for the version of a rollback."""
        if not command.allow_rollback or command.digest is None:
            return ()
        history = await self._controller.store.history(model)
        others = frozenset[str]().union(*(desired.other_digests(state, command) for state in history))
        return tuple(
            f"version {command.version} was {other} in an earlier record; {command.source} now holds {command.digest}"
            for other in sorted(others)
        )

    async def unload_lora(self, command: UnloadLora, on_ack: OnAck | None) -> CommandResult:
        """Unload an adapter, and delete its uploads.

        Raises:
            ControlError: `not_found`: no worker has the adapter or should have it. Nothing is recorded.
        """
        command = check_command(command)
        roster = await self._controller.roster(command)
        [(model, workers)] = roster.items()
        loaded = {lora.name for worker in workers for lora in worker.loras}

        def check(state: DesiredState, wanted: AnyCommand) -> AnyCommand:
            if isinstance(wanted, UnloadLora):
                desired.check_unload(state, wanted, loaded)
            return wanted

        outcome = await self._controller.execute(command, roster, on_ack, revise=check)
        result = await self._controller.conclude(outcome)
        for recording in outcome.recordings:
            for registers in recording.before.everywhere:
                recorded = registers.get(command.register)
                if recorded is not None and isinstance(recorded.command, LoadLora):
                    await self._delete_source(model, recorded.command)
        return result

    async def _check_name(self, command: LoadLora, model: str) -> None:
        """Check that no other model has the adapter's name, under which requests would use that model.

        Only an adapter for the base has the name of its own model.
        """
        if command.for_base and command.name == model:
            if unable := await self._controller.without("base_adapters", model):
                problem = f"{', '.join(unable)} run an earlier release, which has no adapters under the model's name"
                raise ControlError(ControlCode.UNSUPPORTED, problem)
        elif command.for_base or await self._controller.is_known(command.name):
            problem = f"is {command.name!r}, which is the name of a model"
            allowed = f"{model!r} with for_base, or a name that no model has"
            raise InvalidRequest("name", problem, allowed)

    async def _delete_source(self, model: str, command: LoadLora) -> None:
        if (state := await self._find_state(model, command.source.objects)) is not None:
            await self._uploads.delete_source(model, command, sources_in(state))

    async def _find_state(self, model: str, objects: str | None) -> DesiredState | None:
        """Return the desired state for the deletion of an upload, or None if it cannot be read now."""
        try:
            return await self.state(model)
        except RollbusError as exc:
            logger.warning("upload.delete_failed objects=%s error=%s", objects, exc)
            return None

    async def check_version(self, command: UpdateWeights | LoadLora, *, min_staged: int | None = None) -> None:
        """Raise the errors of loading this version before a command is sent. The source need not exist yet.

        Without workers, check only the user's certificate and the desired state.

        Args:
            command: the command, with its model.
            min_staged: as in `update_weights`.
        """
        command = check_command(command)
        try:
            roster = await self._controller.roster(command)
        except NoWorkers:
            roster = {}
        model = command.model or ""
        self._controller.check_allowed(command, (model,))
        if roster and isinstance(command, UpdateWeights):
            await self._check_update(model, command, roster, min_staged)
        else:
            desired.check_recordable(await self.state(model), command)

    async def state(self, model: str) -> DesiredState:
        """Return the desired state of the workers of `model`."""
        return await self._controller.store.current(model)

    async def _check_update(self, model: str, command: UpdateWeights, roster: Roster, min_staged: int | None) -> None:
        """Raise the errors that these workers and the recording would raise, before an upload or a command."""
        if min_staged is not None:
            check_int("min_staged", min_staged, 1, len(roster[model]))
        if command.expected_canary is not None:
            for worker in roster[model]:
                if worker.capabilities is not None:
                    check_expected(command.expected_canary, worker.capabilities)
        state = await self.state(model)
        desired.check_recordable(state, command)
        if not command.allow_rollback:
            check_started(state, roster[model], command)

    @asynccontextmanager
    async def _source(self, model: str, command: Load, upload: bool) -> AsyncIterator[Load]:
        """Upload the source if `upload` is set. At the end of the block, delete the upload if no worker can need it."""
        if not upload:
            yield command
            return
        objects = await self._uploads.put(model, command, Path(command.source.path or ""))
        may_be_recorded_yet = False
        try:
            yield structs.replace(command, source=WeightSource(objects=objects))
        except BusBroken:
            # The last message may arrive after the reconnect, and record the command.
            may_be_recorded_yet = True
            raise
        finally:
            state = None if may_be_recorded_yet else await self._find_state(model, objects)
            if state is not None and objects not in sources_in(state) and not desired.may_come_back(state, command):
                await self._uploads.delete(objects)

    async def _prune(self, model: str, command: Load, outcome: CommandOutcome) -> None:
        """Delete uploads that are older than that of `command`. Keep those that are recorded or were before it."""
        befores = [recording.before for recording in outcome.recordings]
        try:
            keep = sources_in(await self.state(model), *befores)
            # The failure of another controller's command brings back what was recorded before it.
            recorded = keep | sources_in(*await self._controller.store.history(model))
        except RollbusError as exc:
            logger.warning("upload.prune_failed model=%s error=%s", model, exc)
            return
        await self._uploads.prune(model, command, keep)
        await self._uploads.sweep(model, recorded)

    async def _check(
        self, command: UpdateWeights, roster: Roster, on_ack: OnAck | None, min_staged: int | None
    ) -> tuple[CommandOutcome, Quorum | None]:
        """Have all workers stage the source. Return the outcome, and the workers that the update must wait for.

        Raises:
            CommandIncomplete: a worker cannot stage it or did not answer in time, no worker is left, or fewer than
                `min_staged` workers have staged it.
        """
        quorum = None if min_staged is None else Quorum(count=min_staged)
        outcome = await self._controller.execute(_check_of(command), roster, on_ack, quorum=quorum)
        result = outcome.result
        if min_staged is not None:
            if len(result.applied) < min_staged:
                raise CommandIncomplete(result, "Nothing was changed.", check_of=command.command)
            return outcome, Quorum(workers=frozenset(result.applied))
        is_refused = result.failed or result.unsupported or result.stale or result.late
        if is_refused or not result.applied or result.missing.keys() - outcome.lost.keys():
            raise CommandIncomplete(result, "Nothing was changed.", check_of=command.command)
        return outcome, None

    async def _conclude(self, outcome: CommandOutcome, roster: Roster) -> CommandResult:
        """Compare the canaries, fence the workers that differ, and return the command result."""
        everyone = {worker.worker: worker for workers in roster.values() for worker in workers}
        dtypes = {
            name: worker.capabilities.dtype for name, worker in everyone.items() if worker.capabilities is not None
        }
        differing = dissenters(outcome.result.applied, dtypes)
        if differing:
            epoch = max(recording.epoch for recording in outcome.recordings)
            fenced = await self._fence(tuple(differing), roster, epoch)
            outcome = replace(outcome, result=_not_verified(outcome.result, differing, fenced))
        return await self._controller.conclude(outcome)

    async def _fence(self, workers: tuple[str, ...], roster: Roster, epoch: int) -> frozenset[str]:
        """Make these workers serve nothing until weights after `epoch` are desired. Return those that confirmed it."""
        logger.error("weights.mismatch_detected workers=%s", ",".join(workers))
        fence = Fence(
            workers=workers,
            epoch=epoch,
            reason="its canary differs from those of the other workers",
            timeout_s=FENCE_TIMEOUT_S,
        )
        outcome = await self._controller.execute(fence, _only(roster, workers), None)
        return frozenset(outcome.result.applied)


def _only(roster: Roster, workers: tuple[str, ...]) -> Roster:
    """Return the part of the roster with these workers."""
    return {model: tuple(p for p in present if p.worker in workers) for model, present in roster.items()}


def _not_verified(result: CommandResult, differing: dict[str, str], fenced: frozenset[str]) -> CommandResult:
    """Return the result with the `differing` workers, and the reasons, among those that failed."""
    failed = dict(result.failed)
    for worker, why in differing.items():
        state = "it serves nothing" if worker in fenced else "it did not confirm that it serves nothing"
        error = AckError(code=ControlCode.NOT_VERIFIED, message=f"{why}; {state}"[:MAX_ERROR_CHARS])
        failed[worker] = structs.replace(result.applied[worker], status=AckStatus.FAILED, error=error)
    applied = {worker: ack for worker, ack in result.applied.items() if worker not in differing}
    return structs.replace(result, applied=applied, failed=dict(sorted(failed.items())))


def _check_of(command: Load) -> CheckWeights:
    """Return the command that makes the same workers stage the source of `command`."""
    shared = {name: getattr(command, name) for name in ("source", "model", "workers", "timeout_s")}
    return CheckWeights(adapter=isinstance(command, LoadLora), **shared)


def _with_warnings(outcome: CommandOutcome, warnings: tuple[str, ...]) -> CommandOutcome:
    return replace(outcome, result=structs.replace(outcome.result, warnings=warnings))


def _at_next_version(state: DesiredState, command: LoadLora) -> LoadLora:
    return structs.replace(command, version=desired.next_lora_version(state, command.register))


def _revise_version(state: DesiredState, command: AnyCommand) -> AnyCommand:
    return _at_next_version(state, command) if isinstance(command, LoadLora) else command


async def provision(
    server: Server,
    fleet: str,
    models: Iterable[str],
    limits: Mapping[str, int] | None = None,
    *,
    upload_bytes: int | None = None,
) -> dict[str, str]:
    """Create the queues of `models` and the bucket of desired states, and make the models known. Safe to repeat.

    Workers and controllers may use them but not create them. On a server without permissions, they create them.

    Args:
        limits: limits of the queues, by the field names of `QueueLimits`; queues that exist get them too.
        upload_bytes: size in bytes of each model's bucket for published weights; buckets that exist are resized. None:
            create no such bucket.

    Returns:
        By bucket for published weights: `created`, `resized` or `unchanged`; empty without `upload_bytes`.

    Raises:
        BusBroken: JetStream does not answer or refuses; its cause is `PermissionDenied` if the user is no admin.
        ControlError: a bucket for published weights cannot be created, or holds more than its new size.
        InvalidRequest: the fleet's name is not valid in a subject, or a queue holds more than a limit allows.
    """
    subjects, buckets = Subjects(fleet), dict[str, str]()
    async with connected(server, name=f"rollbus provision {fleet}") as nats:
        store = DesiredStore(nats, subjects)
        await store.ensure_bucket()
        await ensure_session_bucket(nats, subjects.fleet)
        for model in models:
            await ensure_queue(nats, subjects, model)
            if limits:
                await set_limits(nats, subjects, model, limits)
            if upload_bytes:
                bucket = published_bucket(fleet, model)
                buckets[bucket] = await set_bucket_bytes(nats, bucket, upload_bytes)
            # Last, because the state makes the model known.
            await store.begin(model)
    return buckets
