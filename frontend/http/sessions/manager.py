"""The sessions that this service answers: read from the bucket, kept for a while, and their running turns."""

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import numpy as np
from msgspec.structs import replace
from starlette.requests import Request

from .... import bus
from ....schemas.checks import describe
from ....schemas.errors import RollbusError
from ....schemas.rows import DTYPES, Rows, dtype_of
from ...sessions.tree import SessionError, SessionTree, Turn
from ..access import given_tokens
from ..errors import HttpError
from ..requests import SESSION_ID, SESSION_ID_HEADER
from .running import RunningTurn
from .store import MAX_SESSIONS, Claim, SessionHead, SessionLimits, SessionStore, TurnRecord, ended, unknown_session

logger = logging.getLogger(__name__)

MAX_CACHED_TOKENS: Final = 8_000_000
"""Stored tokens of the sessions that stay in memory, with their texts about 200 MB. Rows are not kept."""
SWEEP_S: Final = 60.0
FULL_SWEEP_S: Final = 1.0
"""Seconds between two sweeps, and between two sweeps of a fleet that has as many sessions as it may."""
WATCH_S: Final = 2.0
"""Seconds between two reads of the heads of sessions with running turns: another service may have ended them."""
CLAIM_S: Final = 30.0
"""Seconds after which the turns of a service that is gone may run at another one."""
KEY: Final = "sk-session-"
"""Begins the key of each session."""


@dataclass(eq=False)
class Session:
    """One session as this service knows it."""

    head: SessionHead
    tree: SessionTree = field(default_factory=SessionTree)
    running: list[RunningTurn] = field(default_factory=list)
    """Turns that run in this service."""
    reserved_tokens: int = 0
    """Tokens that the running turns may still add."""
    reserved_cost: float = 0.0
    """What the running turns may still cost."""
    ends: dict[str, str] = field(default_factory=dict)
    """By leaf: how its whole prompt compares with the template at the end."""


class Sessions:
    """The sessions of one service. Enter `running` before any turn begins."""

    def __init__(self, rb: bus.Client) -> None:
        self.store = SessionStore(rb)
        self._cached: OrderedDict[str, Session] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: asyncio.TaskGroup | None = None
        self._swept_at = -SWEEP_S
        self._service = secrets.token_hex(8)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Own the tasks of running turns. At the end, stop the turns and store their tokens."""
        async with asyncio.TaskGroup() as self._tasks:
            watching = self._tasks.create_task(self._watch())
            try:
                yield
            finally:
                watching.cancel()
                for session in self._cached.values():
                    for turn in session.running:
                        turn.stop()

    def start(self, turn: Coroutine[Any, Any, None]) -> None:
        """Run a turn. It outlives the request that began it."""
        if self._tasks is None:
            turn.close()
            raise HttpError(503, "the service is starting", code="starting")
        self._tasks.create_task(turn)

    async def _watch(self) -> None:
        """Stop the turns of sessions that another service has ended. Renew leases and claims while turns run."""
        while True:
            await asyncio.sleep(WATCH_S)
            for session in [each for each in self._cached.values() if each.running]:
                try:
                    await self._watch_session(session)
                except Exception as error:  # noqa: BLE001 - boundary: no stored session may end the service
                    logger.warning("session.watch_failed session=%s error=%r", session.head.id, error)

    async def _watch_session(self, session: Session) -> None:
        name = session.head.id
        try:
            await self.load(name)
            await self.renew(session)
        except SessionError:
            for turn in session.running:
                turn.stop()
            return
        for turn in list(session.running):
            async with self._lock(name):
                await self._renew_claim(name, turn)

    async def open(self, head: SessionHead) -> None:
        """Store a new session, and delete old ones from time to time.

        The new session is counted too. So no fleet has more sessions than it may, and of two that are opened for the
        last place at the same time, both may be rejected.

        Raises:
            SessionError: `session_limit`: the fleet has too many sessions, or its bucket is full.
        """
        await self.store.create(head)
        left = len(await self.store.names())
        if time.monotonic() > self._swept_at + (SWEEP_S if left <= MAX_SESSIONS else FULL_SWEEP_S):
            left = await self.store.sweep()
            self._swept_at = time.monotonic()
        if left > MAX_SESSIONS:
            await self.store.delete(head.id)
            raise SessionError("session_limit", f"the fleet has {left - 1} sessions; allowed: {MAX_SESSIONS}")

    async def claim(self, session: Session, turn: RunningTurn, *, is_retry: bool) -> None:
        """Claim a turn for this service. `release` gives it back.

        The claim of a service that is gone is replaced. If that service was only frozen, it abandons its turn. A claim
        of this service, whose write had no answer or which was not given back, is replaced too.

        Args:
            is_retry: True: the turn may run already.

        Raises:
            HttpError: 409, another service runs this turn.
            SessionError: `session_limit`: the bucket is full.
        """
        name, prefix, now = session.head.id, f"run.{turn.retry_key or turn.body_digest}", time.time()
        # Several turns may have one body, but only one may have a key.
        key = f"{prefix}.{'key' if turn.retry_key else secrets.token_hex(8)}"
        held = await self.store.read_claim(name, f"{prefix}.*") if is_retry else None
        claim = Claim(key=key if held is None else held[0].key, service=self._service, until=now + CLAIM_S)
        # A retry of a turn that runs here has its answer, and does not come here. The clock of another service may be
        # fast, so its `until` may be far ahead, but it stores its claim again long before `CLAIM_S`.
        if held is None or now > held[0].until or held[2] > CLAIM_S or held[0].service == self._service:
            sequence = await self.store.write_claim(name, claim, 0 if held is None else held[1])
            turn.claim = None if sequence is None else (claim, sequence)
        if turn.claim is None:
            raise turn_running()

    async def _renew_claim(self, name: str, turn: RunningTurn) -> None:
        """Renew a claim, or abandon its turn if another service has replaced the claim."""
        if turn.claim is None:
            return
        claim, before = replace(turn.claim[0], until=time.time() + CLAIM_S), turn.claim[1]
        sequence = await self.store.write_claim(name, claim, before)
        if sequence is None:
            # The last write may be that of this service, if it got no answer, or of a retry, if the turn has ended.
            held = await self.store.read_claim(name, claim.key)
            if held is not None and held[0].service == self._service and not turn.has_ended:
                sequence = held[1]
        turn.claim = None if sequence is None else (claim, sequence)
        if turn.claim is None:
            logger.warning("session.claim_lost session=%s", name)
            turn.abandon()

    async def release(self, session: Session, turn: RunningTurn) -> None:
        """Give a claim back, if no other service has replaced it. If this fails, it ends by itself."""
        name = session.head.id
        async with self._lock(name):
            held, turn.claim = turn.claim, None
            try:
                if held is not None:
                    await self.store.delete(name, held[0].key, held[1])
            except RollbusError as error:
                logger.warning("session.release_failed session=%s error=%s", name, error)

    async def load(self, name: str) -> Session:
        """Return a session with all closed turns, also those of other services.

        Raises:
            SessionError: `unknown_session`.
        """
        async with self._lock(name):
            found = await self.store.read(name) if SESSION_ID.fullmatch(name) else None
            if found is None:
                self._cached.pop(name, None)
                raise unknown_session(describe(name))
            return await self._catch_up(found)

    async def find_named(self, request: Request, *names: str | None) -> Session | None:
        """Return the session that a request of an ordinary route names; None: there is none, so its names are hints.

        The data token, which the ordinary routes require, may read and end every session. So it may also join them. But
        a request that has the key of a session may only join that one.

        Args:
            names: names in the body, which count after that of the header.

        Raises:
            HttpError: 401, the key is that of another session.
        """
        given = (request.headers.get(SESSION_ID_HEADER), *names)
        name = next((each for each in given if each and SESSION_ID.fullmatch(each)), None)
        if name is None:
            return None
        try:
            session = await self.load(name)
        except SessionError:
            return None
        if any(each.startswith(KEY) and not has_key(session.head, each) for each in given_tokens(request)):
            raise wrong_key()
        return session

    def keep(self, session: Session) -> Session:
        """Return the session that this service has under its id now: a loaded one may have made room for others.

        Without a task switch after this call, a turn that is added to `running` keeps it in memory.
        """
        return self._cached.setdefault(session.head.id, session)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _catch_up(self, head: SessionHead, own: Sequence[Turn] = ()) -> Session:
        """Return the session of a head, with the turns that this service does not have yet."""
        session = self._cached.pop(head.id, None) or Session(head)
        self._cached[head.id] = session
        known = {turn.id: turn for turn in own}
        for record in head.turns:
            if record.id not in session.tree.turns:
                turn = known.get(record.id)
                if turn is None:
                    data = await self.store.get(head.id, f"turn.{record.id}", record.parts)
                    turn = msgspec.msgpack.decode(data, type=Turn)
                session.tree.add(turn)
        session.head = head
        total = sum(each.tree.num_tokens for each in self._cached.values())
        for name in [each for each, kept in self._cached.items() if not kept.running and each != head.id]:
            if total <= MAX_CACHED_TOKENS:
                break
            total -= self._cached.pop(name).tree.num_tokens
        return session

    async def close_turn(
        self, session: Session, turn: Turn, rows: Rows | None, answer: bytes, claim: Claim | None
    ) -> None:
        """Store a turn with its rows, and add it to the session. A turn that it has already stays as it is.

        Args:
            claim: the claim of a complete turn, with its first answer.

        Raises:
            HttpError: 409, another service has closed a turn with this claim, because this one was frozen.
            SessionError: `session_limit`: the bucket is full; `unknown_session`: the session was deleted meanwhile.
        """
        if turn.id in session.tree.turns:
            return
        name = session.head.id
        own = "" if claim is None else hashlib.blake2b(claim.key.encode(), digest_size=8).hexdigest()
        record = TurnRecord(id=turn.id, parts=0, claim=own)
        if rows is not None and len(rows):
            data, shape = rows.tobytes(), (rows.shape[1], rows.shape[2])
            parts = await self.store.put(name, f"rows.{turn.id}", data)
            record = replace(record, row_parts=parts, row_bytes=len(data), row_dtype=dtype_of(rows), row_shape=shape)
        answer_parts = await self.store.put(name, f"answer.{turn.id}", answer)
        parts = await self.store.put(name, f"turn.{turn.id}", msgspec.msgpack.encode(turn))
        record = replace(record, parts=parts, answer_parts=answer_parts)

        def added(head: SessionHead) -> SessionHead:
            if any(each.id == turn.id for each in head.turns):
                return head
            if own and any(each.claim == own for each in head.turns):
                raise turn_running()
            return replace(head, turns=(*head.turns, record), used_at=max(head.used_at, time.time()))

        try:
            await self.change(session, added, (turn,))
        except SessionError as error:
            if error.code == "unknown_session":
                # No head names these parts, so no sweep would find them.
                await self.store.delete(name)
            raise

    async def change(
        self, session: Session, change: Callable[[SessionHead], SessionHead], own: Sequence[Turn] = ()
    ) -> SessionHead:
        """Write the head that `change` returns for the present one, and return it.

        Args:
            own: new turns of the head.
        """
        async with self._lock(session.head.id):
            head = await self.store.change(session.head.id, change)
            return (await self._catch_up(head, own)).head

    async def set_reward(self, session: Session, turn: str | None, reward: float) -> None:
        """Set the reward of a turn, or of the session if `turn` is None."""
        if turn is None:
            await self.change(session, lambda head: replace(head, reward=reward))
        else:
            await self.change(session, lambda head: replace(head, rewards={**head.rewards, turn: reward}))

    async def rows(self, session: Session, turns: Sequence[Turn]) -> dict[str, Rows]:
        """Return the rows of turns, by the turn's id."""
        wanted, found = {turn.id for turn in turns}, {}
        for record in session.head.turns:
            if record.id in wanted and record.row_parts:
                data = await self.store.get(session.head.id, f"rows.{record.id}", record.row_parts)
                found[record.id] = np.frombuffer(data, DTYPES[record.row_dtype]).reshape(-1, *record.row_shape)
        return found

    async def answer(self, session: Session, turn: Turn) -> bytes:
        """Return the bytes of an answer, as its client got them."""
        (record,) = (each for each in session.head.turns if each.id == turn.id)
        return await self.store.get(session.head.id, f"answer.{turn.id}", record.answer_parts)

    async def end(self, session: Session) -> SessionHead:
        """End a session: no turn begins any more, and running ones stop and keep their tokens."""
        head = await self.change(session, lambda before: ended(before, time.time()))
        for turn in session.running:
            turn.stop()
        return head

    async def renew(self, session: Session, *, is_asking: bool = False) -> None:
        """Renew the lease, and check that the session has not ended.

        Args:
            is_asking: True: one of the running turns has not begun.

        Raises:
            SessionError: `session_ended`.
        """
        now, head = time.time(), session.head
        if head.ended_at is None and head.is_over(now) and len(session.running) <= is_asking:
            head = await self.change(session, lambda before: ended(before, before.used_at + before.limits.lease_s))
        if head.ended_at is not None:
            raise SessionError("session_ended", f"the session {head.id} has ended; open another one")
        # A write for each turn would cost more than the turn's own.
        if now > head.used_at + head.limits.lease_s / 4:
            await self.change(session, lambda before: replace(before, used_at=now))


def check_room(session: Session, *, turns: int, new: int, prompt: int, row_bytes: int) -> int:
    """Return how many tokens each new turn may sample. The running turns include the one that asks.

    Args:
        turns: number of new turns.
        new: prompt tokens that each adds to the session.
        prompt: all prompt tokens of each, which cost.
        row_bytes: bytes of the rows of one token; 0: rows are not kept.

    Raises:
        SessionError: `session_limit`.
    """
    head, tree = session.head, session.tree
    limits: SessionLimits = head.limits
    num_turns = len(head.turns) + len(session.running) - 1
    if num_turns + turns > limits.max_turns:
        raise SessionError("session_limit", f"the session has {num_turns} turns; allowed: {limits.max_turns}")
    used = tree.num_tokens + session.reserved_tokens
    rooms = [((limits.max_tokens - used) // turns - new, f"{used} tokens", f"{limits.max_tokens}")]
    if row_bytes:
        rows = (limits.max_row_bytes - head.row_bytes) // row_bytes - session.reserved_tokens
        rooms.append((rows // turns - new, f"{head.row_bytes} bytes of rows", f"{limits.max_row_bytes}"))
    if limits.max_cost is not None:
        spent = tree.cost + session.reserved_cost
        left = (limits.max_cost - spent) / turns - limits.highest_cost(prompt, 0)
        affordable = int(left / (limits.sampled_price / 1e6)) if limits.sampled_price else limits.max_tokens
        rooms.append((affordable if left > 0 else 0, f"a cost of {spent:g}", f"{limits.max_cost:g}"))
    for room, have, allowed in rooms:
        if room < 1:
            have_in = f"{have} (branches: {len(tree.leaves(interrupted=True))})"
            raise SessionError(
                "session_limit", f"the session has {have_in}, and this turn adds more; allowed: {allowed}"
            )
    return min(room for room, _, _ in rooms)


def turn_running() -> HttpError:
    """Return the answer to a turn that another service runs. The clients of OpenAI and Anthropic repeat it."""
    message = "another service of this fleet runs this turn; repeat the request to get its answer"
    return HttpError(409, message, code="turn_running", headers={"Retry-After": "1"})


def wrong_key() -> HttpError:
    """Return the answer to a request without the session's key."""
    return HttpError(
        401,
        "the session is unknown, or the token is not its key; allowed: Authorization: Bearer KEY, x-api-key: KEY",
        code="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )


def digest_of(key: str) -> str:
    """Return the digest of a session's key, which is what the bucket has."""
    return hashlib.sha256(key.encode()).hexdigest()


def has_key(head: SessionHead, given: str) -> bool:
    """Return True if a key is that of the session, in constant time."""
    return hmac.compare_digest(digest_of(given), head.key_digest)
