"""The bucket of sessions: one head for each session, written with compare-and-set, and the objects of its turns.

The parts of a turn are stored before the head names them, so a reader sees a whole turn or none. Any service of the
fleet can therefore answer any session, and a restart loses no closed turn.
"""

import base64
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from .... import bus
from ....bus.client.client import runtime_of
from ....bus.control.session_bucket import MAX_AGE_S, SESSIONS_BYTES, ensure_session_bucket
from ....bus.nats.jetstream import (
    NO_MESSAGE,
    NO_STREAM,
    TRY_S,
    WRONG_LAST_SEQUENCE,
    ApiError,
    Retries,
    Unanswered,
    find,
    put,
)
from ....bus.subjects import session_bucket
from ....schemas.decoding import JsonObject, decode_document
from ....schemas.errors import BusBroken, RemoteProtocolError
from ....schemas.rows import RowDtype
from ...sessions.tree import SessionError

logger = logging.getLogger(__name__)

PART_BYTES: Final = 512 << 10
HEADROOM_BYTES: Final = 8192
MAX_TRIES: Final = 1000
"""Tries of one write of a head. A try fails only if another turn of the session was closed meanwhile."""
MAX_SESSIONS: Final = 4096
"""Sessions of a fleet that are kept at a time. The sweep reads the head of each."""
HEAD: Final = "the head of the session"
STORAGE_FULL: Final = frozenset({10047, 10077, 10122})
"""JetStream's codes for a stream or server without room."""

Policy = Literal["keep", "template"]
"""`keep`: sampled reasoning stays in the context. `template`: a turn whose template drops reasoning forks."""


Seconds = Annotated[float, Meta(gt=0, le=MAX_AGE_S / 4)]
Price = Annotated[float, Meta(ge=0, le=1e12)]


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one session. All branches count."""

    max_turns: Annotated[int, Meta(ge=1, le=4096)] = 1000
    max_tokens: Annotated[int, Meta(ge=1, le=8_000_000)] = 1_000_000
    """Stored tokens: prompts and answers, a shared prefix once."""
    max_seconds: Seconds = 24 * 3600.0
    """Seconds from the opening, after which no turn begins, and a running one ends with `length`."""
    max_row_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 256 << 20
    """Bytes of routed experts. 100,000 tokens of a model with 61 layers and 8 experts each have 49 MB."""
    max_cost: Price | None = None
    """Most that all turns together may cost. None: no bound."""
    prompt_price: Price = 0.0
    """Price of a million prompt tokens that were not in the prefix cache, in the unit of `max_cost`."""
    cached_price: Price = 0.0
    """Price of a million prompt tokens that were in the prefix cache."""
    sampled_price: Price = 0.0
    """Price of a million sampled tokens."""
    lease_s: Seconds = 1800.0
    """Seconds without a turn or a read of the session, after which it ends."""
    retention_s: Seconds = 3600.0
    """Seconds after its end in which samples can be read and rewards set."""

    def cost(self, prompt: int, cached: int, sampled: int) -> float:
        """Return the cost of a turn with a prompt of so many tokens, of which `cached` were in the prefix cache."""
        price = (prompt - cached) * self.prompt_price + cached * self.cached_price + sampled * self.sampled_price
        return price / 1e6

    def highest_cost(self, prompt: int, sampled: int) -> float:
        """Return the highest cost of a turn, whatever the prefix cache has of its prompt."""
        return max(self.cost(prompt, cached, sampled) for cached in (0, prompt))


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One closed turn in the head."""

    id: str
    parts: int
    row_parts: int = 0
    row_bytes: int = 0
    row_dtype: RowDtype = "u1"
    row_shape: tuple[int, int] = (0, 0)
    """Layers and top-k."""
    answer_parts: int = 0
    claim: str = ""
    """Digest of the claim of a complete turn. No other complete turn has it. It is short: a head is one message."""


class SessionHead(msgspec.Struct, frozen=True, kw_only=True):
    """What changes of a session."""

    id: str
    key_digest: str
    seal_key: str = ""
    """Key of the codes in the signatures of reasoning."""
    opened_at: float
    used_at: float
    limits: SessionLimits
    reasoning: Policy = "keep"
    routed_experts: bool = False
    ended_at: float | None = None
    turns: tuple[TurnRecord, ...] = ()
    rewards: dict[str, float] = {}
    """Rewards by the id of a turn."""
    reward: float | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of the routed experts of all turns."""
        return sum(turn.row_bytes for turn in self.turns)

    def is_over(self, now: float) -> bool:
        """Return True if the session has ended, or if its lease has."""
        return self.ended_at is not None or now > self.used_at + self.limits.lease_s

    def frees_at(self) -> float:
        """Return the time at which the session may be deleted, if nobody uses it until then."""
        ended = self.used_at + self.limits.lease_s if self.ended_at is None else self.ended_at
        return ended + self.limits.retention_s


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A running turn, which its service stores so that no other service runs a retry of it."""

    key: str = ""
    """Key of the claim in the bucket, without the session."""
    service: str = ""
    until: float = 0.0
    """Unix time after which the service is gone, if it has not stored the claim again."""


class SessionStore:
    """Reads and writes the bucket. All methods raise `BusBroken` if JetStream does not answer."""

    def __init__(self, rb: bus.Client) -> None:
        runtime = runtime_of(rb)
        self._thread = runtime.thread
        self._nats = runtime.nats
        self._fleet = runtime.config.subjects.fleet
        bucket = session_bucket(self._fleet)
        self._stream, self._subjects = f"KV_{bucket}", f"$KV.{bucket}"

    async def read(self, session: str) -> SessionHead | None:
        """Return the head of a session; None: there is no such session, or `nats kv del` has deleted its head.

        Raises:
            RemoteProtocolError: this version of the service cannot read the head.
        """
        found = await self._get(f"{session}.head")
        return decode_document(found[0], SessionHead, HEAD) if found and found[0] else None

    async def create(self, head: SessionHead) -> None:
        """Store the first head of a session. Create the bucket if it is missing.

        Raises:
            SessionError: `session_limit`: the bucket is full.
        """
        try:
            await self._thread.run(ensure_session_bucket(self._nats, self._fleet))
        except ApiError as error:
            raise BusBroken(f"the bucket of sessions cannot be created: {error}") from error
        await self._put(f"{head.id}.head", msgspec.json.encode(head), 0)

    async def change(self, session: str, change: Callable[[SessionHead], SessionHead]) -> SessionHead:
        """Write the head that `change` returns, and return it. `change` is called again if another write was first.

        Raises:
            SessionError: `unknown_session`; `session_limit`: the bucket is full.
            RemoteProtocolError: this version of the service cannot read the head.
        """
        retries = Retries()
        for _ in range(MAX_TRIES):
            try:
                found = await self._get(f"{session}.head")
                if found is None:
                    raise unknown_session(session)
                before = decode_document(found[0], SessionHead, HEAD)
                after = change(before)
                if after is before:
                    return before
                stored = await self._put(f"{session}.head", msgspec.json.encode(after), found[1])
                if stored is not None:
                    return after
                await retries.note_refusal(found[1])
            except Unanswered as error:
                await retries.wait(error)
        raise BusBroken(f"the session {session} was not written: other writers were first in {MAX_TRIES} tries")

    async def put(self, session: str, name: str, data: bytes) -> int:
        """Store an object. Return the number of its parts.

        Raises:
            SessionError: `session_limit`: the bucket is full.
        """
        size = min(PART_BYTES, self._nats.max_payload - HEADROOM_BYTES)
        starts = range(0, len(data), size)
        for number, start in enumerate(starts):
            await self._put(f"{session}.{name}.{number}", data[start : start + size], None)
        return len(starts)

    async def get(self, session: str, name: str, parts: int) -> bytes:
        """Return an object.

        Raises:
            SessionError: `unknown_session`: a part is missing, because the session was deleted.
        """
        found = []
        for number in range(parts):
            part = await self._get(f"{session}.{name}.{number}")
            if part is None:
                raise unknown_session(session)
            found.append(part[0])
        return b"".join(found)

    async def read_claim(self, session: str, key: str) -> tuple[Claim, int, float] | None:
        """Return a claim with its sequence number and its age in seconds, by the server's clock; None: there is none.

        A key may end with a wildcard.

        What another version of the service wrote may lack fields, or be unreadable: it then delays no retry. Of equal
        turns, only one is closed as complete.
        """
        found = await self._get(f"{session}.{key}")
        info = await self._find("INFO", {}, "the time cannot be read") if found else None
        if not found or not info:
            return None
        data, sequence, subject, stored_at = found
        age_s = (datetime.fromisoformat(info["ts"]) - datetime.fromisoformat(stored_at)).total_seconds()
        try:
            claim = decode_document(data, Claim, "the claim")
        except RemoteProtocolError:
            claim = Claim()
        return replace(claim, key=subject.removeprefix(f"{self._subjects}.{session}.")), sequence, age_s

    async def write_claim(self, session: str, claim: Claim, sequence: int) -> int | None:
        """Store a claim. Return its sequence number; None: another write of its key was first.

        Args:
            sequence: number of the claim that it replaces, 0: none.
        """
        return await self._put(f"{session}.{claim.key}", msgspec.json.encode(claim), sequence)

    async def delete(self, session: str, key: str = ">", sequence: int | None = None) -> None:
        """Delete one key of a session, or all.

        Args:
            sequence: number of the message that is deleted; a later one stays. None: whatever there is.
        """
        body: JsonObject = {"filter": f"{self._subjects}.{session}.{key}"}
        body = body if sequence is None else {**body, "seq": sequence + 1}
        await self._find("PURGE", body, "the session cannot be deleted")

    async def names(self) -> list[str]:
        """Return the ids of all sessions."""
        body = {"subjects_filter": f"{self._subjects}.*.head"}
        info = await self._find("INFO", body, "the sessions cannot be listed")
        return [subject.split(".")[-2] for subject in (info or {"state": {}})["state"].get("subjects") or {}]

    async def sweep(self) -> int:
        """Delete the sessions whose retention has ended. Return the number of sessions that are left.

        A session that this version cannot read does not count, and the bucket deletes it at its greatest age.
        """
        left = 0
        for session in await self.names():
            with suppress(RemoteProtocolError):
                if (found := await self.read(session)) is None:
                    continue
                if time.time() > found.frees_at():
                    await self.delete(session)
                    logger.info("session.deleted session=%s", session)
                else:
                    left += 1
        return left

    async def _find(
        self, operation: str, body: JsonObject, failing: str, absent: int = NO_STREAM, timeout_s: float | None = None
    ) -> JsonObject | None:
        asked = f"STREAM.{operation}.{self._stream}"
        none = {NO_STREAM, absent}
        return await self._thread.run(find(self._nats, asked, body, absent=none, failing=failing, timeout_s=timeout_s))

    async def _get(self, key: str) -> tuple[bytes, int, str, str] | None:
        """Return the last message of a key with its sequence number, subject and time; None: there is none."""
        question: JsonObject = {"last_by_subj": f"{self._subjects}.{key}"}
        answer = await self._find("MSG.GET", question, "the session cannot be read", NO_MESSAGE, TRY_S)
        if answer is None:
            return None
        message = answer["message"]
        return base64.b64decode(message.get("data", "")), message["seq"], message["subject"], message["time"]

    async def _put(self, key: str, data: bytes, sequence: int | None) -> int | None:
        """Store a message. Return its sequence number; None: another write of this key was first.

        Args:
            sequence: number of the message that it replaces, 0: none; None: whatever there is.
        """
        headers = {"Nats-Expected-Stream": self._stream}
        if sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(sequence)
        try:
            return await self._thread.run(put(self._nats, f"{self._subjects}.{key}", data, headers))
        except ApiError as error:
            if error.code in WRONG_LAST_SEQUENCE:
                return None
            if error.code in STORAGE_FULL:
                message = f"the bucket of sessions is full; allowed: {SESSIONS_BYTES} bytes for the fleet"
                raise SessionError("session_limit", message) from error
            raise BusBroken(f"the session cannot be written: {error}") from error


def unknown_session(session: str) -> SessionError:
    """Return the error for a session that does not exist, or not any more."""
    return SessionError("unknown_session", f"the session {session} is unknown, or its retention has ended")


def ended(head: SessionHead, at: float) -> SessionHead:
    """Return the head of an ended session."""
    return head if head.ended_at is not None else replace(head, ended_at=at)
