"""The revisions of a stored desired state, and the selection of the valid revision.

If the fleet has root keys, a revision is valid only if its author may make its change. Readers ignore invalid
revisions. The state is the last valid revision, from the bucket's history or from memory.
"""

import base64
import binascii
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from ...schemas.control import DesiredState
from ...schemas.errors import BusBroken, RemoteProtocolError
from ...schemas.messages import decode_desired
from ..auth.credentials import SIGNED, BadSignature
from ..nats.connection import Connection, subscribe
from ..nats.jetstream import NO_MESSAGE, NO_STREAM, TRY_S, find, headers_of
from ..nats.library import Msg
from ..protocol.fleet.authority import check_limited_state
from ..subjects import BUCKET, Subjects, encode_token

logger = logging.getLogger(__name__)

HISTORY: Final = 64
"""Number of commands of each model that the history keeps, the maximum of a KV bucket."""
MAX_KNOWN: Final = 1024
"""Models whose last valid state is remembered. Beyond it, models without a valid state are removed first: programs that
may write into the bucket can invent names, and a state of a model is at most 1 MB."""
STREAM: Final = f"KV_{BUCKET}"
BASE: Final = "Rollbus-Base"
"""Header of a publisher's state: the last state of an admin or a frontend, in base64."""
BASE_SIGNED: Final = "Rollbus-Base-Signed"
"""Header with the signature of the state in `BASE`."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The last state by an author that may write the whole state, as it was stored."""

    data: bytes
    signed: str
    state: DesiredState


@dataclass(frozen=True, slots=True)
class Found:
    """The content of the bucket for one model."""

    sequence: int = 0
    """Sequence number of the newest revision, valid or not, which the next write replaces. 0: there is none."""
    state: DesiredState | None = None
    """State of the newest valid revision; None: there is none."""
    base: _Base | None = None
    """Base of that state; None: there is no base, or signatures are not required."""
    problem: str | None = None
    """Reason why the newest revision is unusable, if signatures are not required and no other revision replaces it."""

    def base_headers(self) -> dict[str, str]:
        """Return the headers that a publisher adds to the next state."""
        if self.base is None:
            return {}
        return {BASE: base64.b64encode(self.base.data).decode(), BASE_SIGNED: self.base.signed}


@dataclass(frozen=True, slots=True)
class _Revision:
    """One message of the bucket."""

    sequence: int
    data: bytes
    headers: dict[str, str]
    """Empty also if signatures are not required: nothing else of them is read."""
    stored_at: str = ""
    """Time at which the server stored it, by the server's clock. Empty: this program wrote it and has not read it
    back."""


class StoredState(NamedTuple):
    """A state in the bucket's history."""

    sequence: int
    """Its sequence number in the bucket."""
    at: float
    """Unix time at which the server stored it, by the server's clock."""
    state: DesiredState


@dataclass(frozen=True, slots=True)
class _ReadRevisions:
    """The position up to which this program has read the revisions of a model."""

    newest: _Revision
    """Last revision that was read."""
    found: Found
    """Valid state at that position."""
    created: str
    """Creation time of the bucket, as the server reports it. Authors of states cannot forge it. Empty: not read yet."""


class Revisions:
    """Reads the desired states of one fleet. Every method raises `BusBroken` if JetStream does not answer."""

    def __init__(self, nats: Connection, subjects: Subjects) -> None:
        self._nats = nats
        self._subjects = subjects
        self._signatures = nats.signatures
        self._known: dict[str, _ReadRevisions] = {}
        """By subject, one entry for each model."""
        self.refused = 0
        """Number of stored states that were ignored because no authorized author signed them."""

    def debug_state(self) -> dict[str, int]:
        """Return counts of what is remembered, for tests. The names are not stable."""
        return {"models": len(self._known), "refused": self.refused}

    def subject(self, model: str) -> str:
        """Return the subject of writes to the desired state of `model`.

        A message there is only a hint to read the state again, because the server also delivers writes that it rejects.
        """
        return f"$KV.{BUCKET}.{self._subjects.fleet}.{encode_token(model)}"

    async def watch(self, model: str, on_write: Callable[[], object]) -> None:
        """Call `on_write` for each write, also for rejected ones. Raises `BusClosed` if the connection is closed."""

        def receive(_message: Msg) -> None:
            on_write()

        await subscribe(self._nats, self.subject(model), receive)

    async def find(self, model: str) -> Found:
        """Return the newest valid state."""
        subject = self.subject(model)
        newest = await self._get({"last_by_subj": subject})
        if newest is None:
            return Found()
        if not self._signatures.are_demanded:
            return _accept_unsigned(model, newest)
        known = self._known.get(subject)
        if known is not None and (known.newest.sequence, known.newest.data) == (newest.sequence, newest.data):
            return known.found
        known = await self._catch_up(subject, model, newest, known)
        self._keep(subject, known)
        return known.found

    def _keep(self, subject: str, known: _ReadRevisions) -> None:
        self._known[subject] = known
        if len(self._known) > MAX_KNOWN:
            stateless = (other for other, read in self._known.items() if read.found.state is None)
            del self._known[next(stateless, next(iter(self._known)))]

    def remember(self, model: str, over: Found, sequence: int, data: bytes, headers: dict[str, str]) -> None:
        """Store a revision that this program wrote over `over`, so that it counts even if it cannot be read back."""
        if self._signatures.are_demanded:
            revision = _Revision(sequence, data, headers)
            subject = self.subject(model)
            created = self._known[subject].created if subject in self._known else ""
            self._keep(subject, _ReadRevisions(revision, self._follow(subject, model, over, revision), created))

    async def newest(self, model: str) -> Found:
        """Return the newest state without a check of its author."""
        newest = await self._get({"last_by_subj": self.subject(model)})
        return Found() if newest is None else _accept_unsigned(model, newest)

    async def recorded_at(self, model: str, epoch: int) -> datetime | None:
        """Return the time at which the server stored the command of `epoch`, or None if it is not in the history.

        Use the result only for display: authors of revisions are not checked.
        """
        async for state, revision in self._walk(model):
            if state.epoch >= epoch:
                # The oldest revision in the history may be of a later command.
                return datetime.fromisoformat(revision.stored_at) if state.epoch == epoch else None
        return None

    async def history(self, model: str) -> tuple[DesiredState, ...]:
        """Return the states in the history, oldest first, for display only: authors of revisions are not checked."""
        return tuple([state async for state, _ in self._walk(model)])

    async def signed_history(self, model: str, after: int = 0) -> tuple[StoredState, ...]:
        """Return the states in the history after a sequence number, oldest first.

        In a fleet with users, states of invalid authors are left out.
        """
        found, subject = [], self.subject(model)
        async for state, revision in self._walk(model, after + 1):
            if self._signatures.are_demanded:
                try:
                    self._judge(subject, model, Found(), revision)
                except RemoteProtocolError:
                    continue
            found.append(StoredState(revision.sequence, datetime.fromisoformat(revision.stored_at).timestamp(), state))
        return tuple(found)

    async def _walk(self, model: str, start: int = 1) -> AsyncIterator[tuple[DesiredState, _Revision]]:
        """Yield each revision from the sequence number `start` on that can be decoded, oldest first."""
        async for revision in self._revisions(self.subject(model), start):
            try:
                state = _decode(model, revision.data)
            except RemoteProtocolError:
                continue
            yield state, revision

    async def _revisions(self, subject: str, start: int) -> AsyncIterator[_Revision]:
        """Yield each revision from the sequence number `start` on, oldest first."""
        for _ in range(2 * HISTORY):  # other programs may write at the same time
            revision = await self._get({"seq": start, "next_by_subj": subject})
            if revision is None:
                return
            yield revision
            start = revision.sequence + 1

    async def _catch_up(
        self, subject: str, model: str, newest: _Revision, known: _ReadRevisions | None
    ) -> _ReadRevisions:
        """Read the revisions after `known`, or all revisions if the bucket was lost and created again."""
        if known is None:
            found = await self._go_through(subject, model, newest, 1, Found())
            return _ReadRevisions(newest, found, await self._creation())
        before, is_later = known.found, known.newest.sequence < newest.sequence
        if is_later:
            found = await self._go_through(subject, model, newest, known.newest.sequence + 1, before)
            if found.state is not before.state:
                return _ReadRevisions(newest, found, known.created)
        created = await self._creation()
        if is_later and known.created in {"", created}:
            return _ReadRevisions(newest, found, created)
        found = await self._go_through(subject, model, newest, 1, Found())
        # If the history has no valid revision any more, the known state stays valid.
        return _ReadRevisions(
            newest, found if found.state is not None else replace(before, sequence=newest.sequence), created
        )

    async def _go_through(self, subject: str, model: str, newest: _Revision, start: int, found: Found) -> Found:
        """Return the valid state after the revisions `start` to `newest`, where `found` is the state before them."""
        async for revision in self._revisions(subject, start):
            if revision.sequence <= newest.sequence:
                found = self._follow(subject, model, found, revision)
            if revision.sequence >= newest.sequence:
                break
        return replace(found, sequence=newest.sequence)

    async def _creation(self) -> str:
        info = await self.bucket_info()
        if info is None:
            raise BusBroken("the bucket of desired states does not exist")
        return str(info["created"])

    async def bucket_info(self) -> dict[str, Any] | None:
        """Return the server's report on the bucket. None: there is no bucket."""
        failing = "the state of the bucket of desired states cannot be read"
        return await find(self._nats, f"STREAM.INFO.{STREAM}", absent={NO_STREAM}, failing=failing, timeout_s=TRY_S)

    def _follow(self, subject: str, model: str, found: Found, revision: _Revision) -> Found:
        """Return the new state if `revision` is valid after `found`; otherwise return `found`."""
        try:
            return self._judge(subject, model, found, revision)
        except RemoteProtocolError as error:
            self.refused += 1
            if self.refused.bit_count() == 1:  # at 1, 2, 4, 8 ...: many invalid revisions cause few log lines
                logger.warning(
                    "desired.revision_rejected model=%s sequence=%s so_far=%s error=%s",
                    *(model, revision.sequence, self.refused, error),
                )
            return found

    def _judge(self, subject: str, model: str, found: Found, revision: _Revision) -> Found:
        signed = self._signatures.check(subject, revision.data, revision.headers)
        if signed is None:
            raise BadSignature("this fleet requires no signatures")
        state = _decode(model, revision.data)
        if found.state is not None and state.epoch < found.state.epoch:
            raise RemoteProtocolError(f"epoch {state.epoch} was recorded again after epoch {found.state.epoch}")
        if not signed.by.is_limited:
            base = _Base(revision.data, revision.headers[SIGNED], state)
            return Found(revision.sequence, state, base)
        carried = self._base(subject, model, revision.headers)
        if found.base is not None and (carried is None or carried.state.epoch < found.base.state.epoch):
            raise RemoteProtocolError(f"the state by {signed.by.name} omits epoch {found.base.state.epoch}")
        if found.state is not None and found.state.bucket not in {"", state.bucket}:
            raise RemoteProtocolError(f"the state by {signed.by.name} has the id of another bucket")
        check_limited_state(signed.by, state, None if carried is None else carried.state)
        if state.epoch > revision.sequence:
            raise RemoteProtocolError(f"epoch {state.epoch} is above the message's sequence number {revision.sequence}")
        return Found(revision.sequence, state, carried)

    def _base(self, subject: str, model: str, headers: dict[str, str]) -> _Base | None:
        if BASE not in headers:
            return None
        try:
            data = base64.b64decode(headers[BASE], validate=True)
        except (binascii.Error, ValueError):
            raise BadSignature(f"the header {BASE} is not valid base64") from None
        signature = headers.get(BASE_SIGNED, "")
        signed = self._signatures.check(subject, data, {SIGNED: signature})
        if signed is None or signed.by.is_limited:
            raise BadSignature(f"the author of the state in the header {BASE} may not write the whole state")
        return _Base(data, signature, _decode(model, data))

    async def _get(self, question: dict[str, Any]) -> _Revision | None:
        # Read from the stream's leader, not with DIRECT.GET: a replica may answer with a state older than the command
        # that caused this read. A deposed leader may also return an old state, which the callers detect.
        absent, failing = {NO_STREAM, NO_MESSAGE}, "the desired states cannot be read"
        answer = await find(
            self._nats, f"STREAM.MSG.GET.{STREAM}", question, absent=absent, failing=failing, timeout_s=TRY_S
        )
        if answer is None:
            return None
        message = answer["message"]
        headers = headers_of(message) if self._signatures.are_demanded else {}
        return _Revision(message["seq"], base64.b64decode(message.get("data", "")), headers, message["time"])


def _accept_unsigned(model: str, newest: _Revision) -> Found:
    try:
        # A deleted state counts as empty. Its epoch is later than every epoch before it.
        empty = DesiredState(model=model, epoch=newest.sequence)
        return Found(newest.sequence, _decode(model, newest.data) if newest.data else empty)
    except RemoteProtocolError as error:
        return Found(newest.sequence, problem=str(error))


def _decode(model: str, data: bytes) -> DesiredState:
    state = decode_desired(data)
    if state.model != model:
        raise RemoteProtocolError(f"the state belongs to model {state.model!r}")
    return state
