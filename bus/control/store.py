"""The store of desired states: a NATS KV bucket, readable with `nats kv`, whose history is the log of all commands.

Writes are compare-and-set on the last sequence number of the key. Of concurrent writers, one succeeds, and the others
decide again on the new state. A write without an answer, for example during a leader election, may have been stored.
The writer then reads the state, and repeats the write as the same command only if it is missing.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection
from typing import Final

from msgspec.structs import replace

from ...schemas.control import AnyCommand, DesiredState, UnloadLora
from ...schemas.errors import BusBroken, ControlCode, ControlError, RemoteProtocolError
from ...schemas.messages import encode_json
from ..logs import RejectionCount
from ..nats.connection import Connection
from ..nats.jetstream import (
    NO_STREAM,
    TRY_S,
    WRONG_LAST_SEQUENCE,
    ApiError,
    Retries,
    Unanswered,
    create_stream,
    find,
    put,
)
from ..protocol.fleet import desired
from ..protocol.fleet.authority import check_unlimited
from ..subjects import BUCKET, Subjects, decode_token
from .revisions import HISTORY, STREAM, Found, Revisions

logger = logging.getLogger(__name__)

MAX_STATE_BYTES: Final = 1024**2
"""Maximum bytes of one state. A state with a thousand workers' own commands, or hundreds of adapters, takes a third."""
MAX_BUCKET_BYTES: Final = 64 * 1024**2
"""Size of the bucket in bytes: the full history of one state of maximum size, or of thousands of usual states."""
MAX_TRIES: Final = 1000
"""Maximum tries of one write. A try fails only if another writer succeeds. If workers of a fleet record the same
command, one worker succeeds and the others find the command recorded."""
SINGLE_S: Final = 30.0
"""Seconds for which the bucket is assumed to stay on one server. A fleet of a thousand workers then asks rarely."""

_SUBJECTS: Final = f"$KV.{BUCKET}"


class DesiredStore(Revisions):
    """The desired states of one fleet: reads them, and records commands.

    Every method that reads or writes raises `BusBroken` if JetStream is missing, does not answer or refuses. A write
    waits up to `ELECTION_S` for an answer. If it then raises `Unanswered`, the state may have been stored.
    """

    def __init__(self, nats: Connection, subjects: Subjects) -> None:
        super().__init__(nats, subjects)
        self._single_until = -math.inf
        self._rejected = RejectionCount()

    async def read(self, model: str) -> DesiredState | None:
        """Return the desired state of `model`, or None if nothing was ever recorded. A deleted state is empty.

        In a cluster, the state may be older than one that was read before: see `rollbus.bus.protocol.fleet.desired`.

        Raises:
            RemoteProtocolError: the stored message is no valid desired state; `reset` clears it.
        """
        return self._usable(model, await self.find(model)).state

    async def is_valid(self, model: str) -> bool:
        """Return True if the stored state of `model` can be decoded and, in a fleet with users, is signed."""
        try:
            return await self.read(model) is not None
        except RemoteProtocolError:
            return False

    async def current(self, model: str) -> DesiredState:
        """Return the state over which a command would be recorded, empty if there is none. Wait during an election.

        Raises:
            RemoteProtocolError: the stored message is no valid desired state; `reset` clears it.
        """
        return await self.change(model, lambda state: state)

    async def confirmed_s(self) -> float:
        """Return the seconds since a majority of the servers confirmed the answering server as the bucket's leader.

        The result is 0 if the states are on one server. A read after this call contains all states written up to the
        confirmation. A leader that is disconnected from the other servers keeps answering for a while, with old states.
        """
        info = None if time.monotonic() < self._single_until else await self.bucket_info()
        if info is None:
            return 0.0
        others = (info.get("cluster") or {}).get("replicas") or ()
        if not others:
            self._single_until = time.monotonic() + SINGLE_S
            return 0.0
        heard = sorted(math.inf if other.get("offline") else other["active"] / 1e9 for other in others)
        # Of three servers, one server and the leader are a majority.
        return heard[(len(heard) - 1) // 2]

    async def record(
        self, model: str, command: AnyCommand, by: str = "", *, loaded: Collection[str] | None = None
    ) -> tuple[DesiredState, int]:
        """Record `command`. Return the new state and the epoch. See `rollbus.bus.protocol.fleet.desired.record`.

        Args:
            loaded: names of the loaded adapters. An unload of another adapter is recorded only if it should be loaded.
                None: record every unload.

        Cancellation: the command may or may not be recorded. Recording it again with the same id is harmless.

        Raises:
            ControlError: the state rejects the command; nothing is recorded.
            RemoteProtocolError: the stored message is no valid desired state; `reset` clears it.
        """
        epoch = 0

        def recorded(state: DesiredState) -> DesiredState:
            nonlocal epoch
            if loaded is not None and isinstance(command, UnloadLora):
                desired.check_unload(state, command, loaded)
            state, epoch = desired.record(state, command, by, time.time())
            return state

        return await self.change(model, recorded), epoch

    async def change(self, model: str, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Write the state that `change` returns, and return it. Write nothing if `change` returns its argument.

        `change` is called again if another writer stored a state first. Its exceptions end the attempt.

        Raises:
            ControlError: the state would be too large.
            RemoteProtocolError: the stored message is no valid desired state; `reset` clears it.
        """
        retries = Retries()
        unanswered: list[tuple[DesiredState, DesiredState]] = []
        for _ in range(MAX_TRIES):
            try:
                found = self._usable(model, await self.find(model))
                before = _with_bucket_id(found.state or await self._first(model, found))
                for written, over in unanswered:
                    if desired.contains(before, written, over):
                        return written
                after = change(before)
                if after is before:
                    return after
                unanswered.append((after, before))
                if await self._write(model, after, found):
                    return after
                unanswered.pop()
                await retries.note_refusal(found.sequence)
            except Unanswered as error:
                await retries.wait(error)
        raise _contention_error(model)

    async def begin(self, model: str) -> None:
        """Write an empty first state, which makes the model known, unless a state is stored.

        Raises:
            Unanswered: the state may have been stored. This method does not wait for an election.
        """
        found = await self.find(model)
        if not found.sequence:
            # If another writer is first, the model is known too.
            await self._write(model, _with_bucket_id(await self._first(model, found)), found)

    async def forget(self, model: str) -> None:
        """Delete the desired state of `model` with its history. The model is then unknown."""
        failing, body = f"the desired state of {model!r} cannot be deleted", {"filter": self.subject(model)}
        await find(self._nats, f"STREAM.PURGE.{STREAM}", body, absent={NO_STREAM}, failing=failing)

    async def _first(self, model: str, found: Found) -> DesiredState:
        """Return an empty state after a lost state, or in place of none.

        Its epoch is a sequence number that no earlier epoch exceeds. If no state is stored, earlier states may have
        been forgotten. Readers that remember a signed state would reject lower epochs.
        """
        sequence = found.sequence
        if not sequence and self._nats.signatures.are_demanded:
            info = await self.bucket_info()
            sequence = 0 if info is None else info["state"]["last_seq"]
        return DesiredState(model=model, epoch=sequence)

    async def reset(self, model: str) -> bool:
        """Clear the desired state of `model`, even if it cannot be decoded. Return False if nothing is recorded.

        The epochs continue, because workers would treat commands with lower epochs as old.
        """
        retries, is_sent = Retries(), False
        for _ in range(MAX_TRIES):
            try:
                found = await self.find(model)
                before = found.state or DesiredState(model=model, epoch=found.sequence)
                if found.problem is not None:
                    logger.warning("desired.decode_failed model=%s error=%s", model, found.problem)
                elif not before.registers and not before.workers:
                    return is_sent
                is_sent = True
                if await self._write(model, desired.cleared(_with_bucket_id(before)), found):
                    return True
                await retries.note_refusal(found.sequence)
            except Unanswered as error:
                await retries.wait(error)
        raise _contention_error(model)

    async def sign(self, model: str) -> DesiredState | None:
        """Sign the stored desired state of `model` without a check of its author. Return None if nothing is recorded.

        Use this for states that were stored before the fleet had its root key, or before that key was replaced.

        Raises:
            ControlError: this user may not write the whole state.
            RemoteProtocolError: the stored message is no valid desired state; `reset` clears it.
        """
        check_unlimited(self._nats.signatures.own)
        for _ in range(MAX_TRIES):
            found = self._usable(model, await self.newest(model))
            if found.state is None or await self._write(model, found.state, found):
                return found.state
        raise _contention_error(model)

    async def models(self) -> tuple[str, ...]:
        """Return the models of the fleet that have a stored state, also without recorded commands, sorted.

        While there is a connection, wait during an election.
        """
        retries = Retries()
        while True:
            try:
                return await self._list_models()
            except Unanswered as error:
                if not self._nats.is_connected:
                    raise
                await retries.wait(error)

    async def known_models(self, served: Collection[str], recorded: Collection[str]) -> tuple[str, ...]:
        """Return the models in `served`, and those in `recorded` whose stored state is valid, sorted.

        Roles that write a state may write anything under any name. Only a valid state makes a model known.
        """
        found = set(served)
        if len(found.union(recorded)) > 1:
            recorded = [model for model in recorded if model not in found and await self.is_valid(model)]
        return tuple(sorted(found.union(recorded)))

    async def _list_models(self) -> tuple[str, ...]:
        prefix = f"{_SUBJECTS}.{self._subjects.fleet}."
        body, failing = {"subjects_filter": f"{prefix}*"}, "the desired states cannot be listed"
        answer = await find(self._nats, f"STREAM.INFO.{STREAM}", body, absent={NO_STREAM}, failing=failing)
        found = []
        for subject in () if answer is None else answer["state"].get("subjects") or ():
            try:
                found.append(decode_token(subject.removeprefix(prefix)))
            except ValueError:
                if so_far := self._rejected.add():
                    logger.warning("desired.key_rejected subject=%s so_far=%s", subject, so_far)
        return tuple(sorted(found))

    async def read_all(self) -> dict[str, DesiredState]:
        """Return the desired state of each model with recorded commands whose state can be decoded."""
        states = {}
        for model in await self._list_models():
            try:
                state = await self.read(model)
            except RemoteProtocolError as exc:
                logger.warning("desired.decode_failed model=%s error=%s", model, exc)
                continue
            if state is not None and not state.is_first:
                states[model] = state
        return states

    def _usable(self, model: str, found: Found) -> Found:
        if found.problem is None:
            return found
        raise RemoteProtocolError(
            f"the desired state of {model!r} under {self.subject(model)} cannot be used: {found.problem}; "
            "a reset clears it"
        )

    async def _write(self, model: str, state: DesiredState, over: Found) -> bool:
        """Write `state` if the key's last sequence number is still that of `over`. Return False if it is not."""
        data, sequence, own = encode_json(state), over.sequence, self._nats.signatures.own
        signed = self._nats.signatures.headers(self.subject(model), data)
        if own is not None and own.is_limited:
            signed |= over.base_headers()
        # Half, because the state is read back as base64 in JSON.
        allowed = min(MAX_STATE_BYTES, self._nats.max_payload // 2)
        size = len(data) + sum(map(len, signed.values()))
        if size > allowed:
            raise ControlError(
                ControlCode.INVALID_COMMAND,
                f"the desired state of {model!r} would take {size} bytes; allowed: {allowed}",
            )
        headers = {"Nats-Expected-Stream": STREAM, "Nats-Expected-Last-Subject-Sequence": str(sequence), **signed}
        try:
            if not sequence:
                await self.ensure_bucket()
            stored = await put(self._nats, self.subject(model), data, headers, timeout_s=TRY_S)
        except ApiError as error:
            if error.code in WRONG_LAST_SEQUENCE:
                return False
            if error.code == NO_STREAM:
                # The bucket existed a moment ago: it was deleted, or it has no leader.
                raise Unanswered(f"no server stores the desired state of {model!r}") from error
            raise BusBroken(f"the desired state of {model!r} cannot be written: {error}") from error
        self.remember(model, over, stored, data, signed)
        return True

    async def ensure_bucket(self) -> None:
        """Create the bucket if it is missing.

        Call this before the first write. Without the bucket, the server delivers the write only to the workers that
        subscribe to its subject, and the writer receives no answer.
        """
        if await find(self._nats, f"STREAM.INFO.{STREAM}", absent={NO_STREAM}) is None:
            limits = {"max_msgs_per_subject": HISTORY, "max_bytes": MAX_BUCKET_BYTES}
            limits["max_msg_size"] = MAX_STATE_BYTES + 1024  # headers count
            what = "what each model's workers should be doing"
            await create_stream(self._nats, kv_stream(BUCKET, what, deny_delete=True, allow_direct=True, **limits))


def _with_bucket_id(state: DesiredState) -> DesiredState:
    """Return the state with a bucket id. Add a new id if it has none: it is the first, or older than bucket ids."""
    return state if state.bucket else replace(state, bucket=uuid.uuid4().hex)


def _contention_error(model: str) -> BusBroken:
    return BusBroken(f"the desired state of {model!r} was not written: other writers were first in {MAX_TRIES} tries")


def kv_stream(bucket: str, description: str, **settings: object) -> dict[str, object]:
    """Return the configuration that makes a stream a KV bucket for NATS's own tools."""
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "description": f"rollbus: {description}",
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "allow_rollup_hdrs": True,
        **settings,
    }
