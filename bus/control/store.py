"""The store of desired states: a NATS KV bucket, readable with `nats kv`, whose history is the log of all commands.

Writes are compare-and-set on the last sequence number of the key. Of concurrent writers, one succeeds, and the others
decide again on the new state. A write without an answer, for example during a leader election, may have been stored.
The writer then reads the state, and repeats the write as the same command only if it is missing.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from ...schemas.control import AnyCommand
from ...schemas.desired import DesiredState
from ...schemas.errors import BusBroken, ControlCode, ControlError, RemoteProtocolError
from ...schemas.messages import encode_json
from ..nats.connection import Connection
from ..nats.jetstream import NO_STREAM, WRONG_LAST_SEQUENCE, ApiError, Unanswered, ask, create_stream, put
from ..protocol.fleet import desired
from ..protocol.fleet.authority import check_unlimited
from ..subjects import BUCKET, Subjects, decode_token
from .retries import TRY_S, Retries
from .revisions import HISTORY, STREAM, Found, Revisions

__all__ = ["DesiredStore"]

logger = logging.getLogger(__name__)

MAX_STATE_BYTES: Final = 1024**2
"""A state with a thousand workers' own commands, or with hundreds of adapters, takes a third of it."""
MAX_BUCKET_BYTES: Final = 64 * 1024**2
"""The full history of one state of the largest size, or of thousands of usual ones."""
MAX_TRIES: Final = 1000
"""Of one write. Each failure means that another writer got through: of a fleet's workers that record the same command
one, and the others find it recorded."""
SINGLE_S: Final = 30.0
"""How long the bucket is taken to be on one server still: each of a thousand workers would ask twice in its lease."""

_SUBJECTS: Final = f"$KV.{BUCKET}"


class DesiredStore:
    """The desired states of one fleet.

    Every method that reads or writes raises `BusBroken` if JetStream is missing, does not answer or refuses. A write
    waits for an answer for `ELECTION_S`; if it then raises `Unanswered`, it may have been stored.
    """

    def __init__(self, nats: Connection, subjects: Subjects) -> None:
        self._nats = nats
        self._subjects = subjects
        self._revisions = Revisions(nats, subjects)
        self._single_until = -math.inf

    def __repr__(self) -> str:
        """One line with the fleet."""
        return f"<DesiredStore {self._subjects.fleet}>"

    def subject(self, model: str) -> str:
        """Where writes to the desired state of `model` can be heard.

        A hint to read again, no more: writes that were refused are heard too.
        """
        return self._revisions.subject(model)

    @property
    def refused(self) -> int:
        """Number of stored states that were ignored because no authorized author signed them."""
        return self._revisions.refused

    async def read(self, model: str) -> DesiredState | None:
        """The desired state of `model`; None: nothing was ever recorded. What was deleted reads as empty.

        In a cluster it may be older than what was read before: see `rollbus.bus.protocol.fleet.read_order`.

        Raises:
            RemoteProtocolError: what stands there is no desired state; `reset` clears it.
        """
        return self._usable(model, await self._revisions.find(model)).state

    async def current(self, model: str) -> DesiredState:
        """The state that a command would be recorded over, empty where there is none; waits while a leader is elected.

        Raises:
            RemoteProtocolError: what stands there is no desired state; `reset` clears it.
        """
        return await self.change(model, lambda state: state)

    async def recorded_at(self, model: str, epoch: int) -> datetime | None:
        """Return when the command of `epoch` was recorded; None if the bucket's history does not reach back to it."""
        return await self._revisions.recorded_at(model, epoch)

    async def confirmed_s(self) -> float:
        """Seconds since a majority of the servers that hold the states confirmed the one that answers as their leader.

        0 where they are on one server. A read after this call has all that was written until then: a leader that is
        parted from the others goes on answering for a while, with what it had.
        """
        if time.monotonic() < self._single_until:
            return 0.0
        try:
            info = await ask(self._nats, f"STREAM.INFO.{STREAM}", timeout_s=TRY_S)
        except ApiError as error:
            if error.code == NO_STREAM:
                return 0.0
            raise BusBroken(f"the bucket of desired states cannot be looked at: {error}") from error
        others = (info.get("cluster") or {}).get("replicas") or ()
        if not others:
            self._single_until = time.monotonic() + SINGLE_S
        heard = sorted(math.inf if other.get("offline") else other["active"] / 1e9 for other in others)
        # Of three, one besides the leader is a majority.
        return heard[(len(heard) + 1) // 2 - 1] if heard else 0.0

    async def record(self, model: str, command: AnyCommand) -> tuple[DesiredState, int]:
        """Record `command`: the state with it, and its epoch. See `rollbus.bus.protocol.fleet.desired.record`.

        Cancellation: it may be recorded or not; recording it again under its id is harmless.

        Raises:
            ControlError: it was refused; nothing is recorded.
            RemoteProtocolError: what stands there is no desired state; `reset` clears it.
        """
        epoch = 0

        def recorded(state: DesiredState) -> DesiredState:
            nonlocal epoch
            state, epoch = desired.record(state, command)
            return state

        return await self.change(model, recorded), epoch

    async def change(self, model: str, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Write what `change` makes of the state, and return it; nothing is written where that is the state itself.

        `change` is called again for each state that another writer got in before; what it raises ends the attempt.

        Raises:
            ControlError: the state would be too large.
            RemoteProtocolError: what stands there is no desired state; `reset` clears it.
        """
        retries = Retries()
        unanswered: list[tuple[DesiredState, DesiredState]] = []
        for _ in range(MAX_TRIES):
            try:
                found = self._usable(model, await self._revisions.find(model))
                before = _named(found.state or _empty(model, found.sequence))
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
        raise _contended(model)

    async def reset(self, model: str) -> bool:
        """Clear the desired state of `model`, also one that cannot be read; False where nothing is recorded.

        Epochs go on, so that later commands do not look old to workers.
        """
        retries, is_sent = Retries(), False
        for _ in range(MAX_TRIES):
            try:
                found = await self._revisions.find(model)
                before = found.state or _empty(model, found.sequence)
                if found.problem is not None:
                    logger.warning("desired.decode_failed model=%s error=%s", model, found.problem)
                elif not before.registers and not before.workers:
                    return is_sent
                is_sent = True
                if await self._write(model, desired.cleared(_named(before)), found):
                    return True
                await retries.note_refusal(found.sequence)
            except Unanswered as error:
                await retries.wait(error)
        raise _contended(model)

    async def sign(self, model: str) -> DesiredState | None:
        """Sign the desired state of `model` as it stands, by any author; None: nothing is recorded.

        For states of before the fleet had its root key, or of before that was replaced.

        Raises:
            ControlError: this user may not write it whole.
            RemoteProtocolError: what stands there is no desired state; `reset` clears it.
        """
        check_unlimited(self._nats.signatures.own)
        for _ in range(MAX_TRIES):
            found = self._usable(model, await self._revisions.newest(model))
            if found.state is None or await self._write(model, found.state, found):
                return found.state
        raise _contended(model)

    async def models(self) -> tuple[str, ...]:
        """Return the models of the fleet with recorded commands, sorted."""
        prefix = f"{_SUBJECTS}.{self._subjects.fleet}."
        try:
            answer = await ask(self._nats, f"STREAM.INFO.{STREAM}", {"subjects_filter": f"{prefix}*"})
        except ApiError as error:
            if error.code == NO_STREAM:
                return ()
            raise BusBroken(f"the desired states cannot be listed: {error}") from error
        found = []
        for subject in answer["state"].get("subjects") or ():
            try:
                found.append(decode_token(subject.removeprefix(prefix)))
            except ValueError:
                logger.warning("desired.key_rejected subject=%s", subject)
        return tuple(sorted(found))

    async def read_all(self) -> dict[str, DesiredState]:
        """Return the desired state of each model whose state can be decoded."""
        states = {}
        for model in await self.models():
            try:
                state = await self.read(model)
            except RemoteProtocolError as exc:
                logger.warning("desired.decode_failed model=%s error=%s", model, exc)
                continue
            if state is not None:
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
        """Write `state` if the key's last sequence number is still that of `over`; False: it is not."""
        data, sequence, own = encode_json(state), over.sequence, self._nats.signatures.own
        signed = self._nats.signatures.headers(self.subject(model), data)
        if own is not None and own.is_limited:
            signed |= over.base_headers()
        # Half: it is read back as base64 in JSON.
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
                # The bucket was there just now: it was deleted, or has no leader.
                raise Unanswered(f"nobody stores the desired state of {model!r}") from error
            raise BusBroken(f"the desired state of {model!r} cannot be written: {error}") from error
        self._revisions.remember(model, over, stored, data, signed)
        return True

    async def ensure_bucket(self) -> None:
        """Make the bucket where it is missing.

        Before the first write, not after its failure: workers listen where it is written to, so that to a server
        without the bucket the write is delivered to them, and no answer comes.
        """
        try:
            await ask(self._nats, f"STREAM.INFO.{STREAM}")
        except ApiError as error:
            if error.code != NO_STREAM:
                raise
            await create_stream(self._nats, _stream_config())


def _empty(model: str, sequence: int) -> DesiredState:
    """Return an empty state after a lost state. Its epoch is the sequence number, which no earlier epoch exceeds."""
    return DesiredState(model=model, epoch=sequence)


def _named(state: DesiredState) -> DesiredState:
    """`state` with the id of its bucket, a new one where it has none: it is the first, or of before there were ids."""
    return state if state.bucket else replace(state, bucket=uuid.uuid4().hex)


def _contended(model: str) -> BusBroken:
    return BusBroken(f"the desired state of {model!r} is written by others without end; {MAX_TRIES} tries failed")


def _stream_config() -> dict[str, object]:
    """What makes a stream a KV bucket to NATS's own tools."""
    return {
        "name": STREAM,
        "subjects": [f"{_SUBJECTS}.>"],
        "description": "rollbus: what each model's workers should be doing",
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": HISTORY,
        "max_msg_size": MAX_STATE_BYTES + 1024,  # headers count
        "max_bytes": MAX_BUCKET_BYTES,
        "deny_delete": True,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }
