"""One turn of a session over the chat API: its prompt from the session's ids, its answer, and its place in the tree.

The core takes one shape: a chat's body (messages, tools, parameters). Other APIs translate theirs into it.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import numpy as np
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from .... import bus
from ....schemas.decoding import JsonObject
from ....schemas.errors import RollbusError
from ....schemas.limits import MAX_N
from ...sessions.joining import CannotJoin, ChatTemplate
from ...sessions.messages import frame_of, make_seal, turn_of_seal
from ...sessions.samples import ids_bytes
from ...sessions.tree import CHECKED, DIFFERS, TAIL, UNCHECKED, WHOLE, Fork, Match, SessionError, Turn
from ...tokenization import Tokenizer
from ..agents.message_blocks import UNSEALED
from ..answers import AnswerChoice
from ..calls import PING
from ..chat import template_message, template_tools
from ..edge import given_request_id
from ..errors import HttpError, http_error, invalid
from ..openai.body import ChatBody
from ..openai.requests import BodyPrompt, given_values, template_variables
from ..openai.routes import AskedTurn
from ..openai.shapes import RequestClock
from ..requests import RequestTarget, find_target, id_headers
from ..service import MIN_LEFT_S, RequestAborted, Service
from ..writer import AnswerWriter, ServedAnswers
from .manager import Session, check_room, turn_running
from .running import RunningTurn, detached

logger = logging.getLogger(__name__)

MAX_MESSAGES: Final = 1 << 15
"""Messages of a history. The event loop compares so many in tenths of a second."""
END_TIMEOUT_S: Final = 5.0
"""Seconds for workers of the leaves' models to serve, so that their templates are known."""
Found = TypeVar("Found", RunningTurn, Turn)
NOT_IN_SESSIONS: Final = {
    "tokens": "the session makes the prompt",
    "add_special_tokens": "the session makes the prompt",
    "prompt_logprobs": "the session sends only new messages",
    "routed_experts_prompt_start": "the session sets it",
    **dict.fromkeys(
        ("nvext.token_data", "nvext.routed_experts_prompt_start", "nvext.extra_fields"), "read the session's samples"
    ),
}
"""Fields that a turn may not have, with the reason."""


def check_turn(body: ChatBody) -> None:
    """Reject fields that would replace the prompt that the session makes.

    Raises:
        HttpError: 400, naming the field.
    """
    if not body.messages:
        raise invalid("messages", "is missing", "at least one message")
    if len(body.messages) > MAX_MESSAGES:
        raise invalid("messages", f"has {len(body.messages)} messages", f"up to {MAX_MESSAGES}")
    for name, value in given_values(body, *NOT_IN_SESSIONS).items():
        if value is not False:
            raise invalid(name, f"is given in a session: {NOT_IN_SESSIONS[name]}", "null")
    if body.continue_final_message:
        reason = "continues a message of the assistant, and a session samples whole answers"
        raise invalid("continue_final_message", reason, "null, and a last message of the user or a tool")
    for name in ("add_generation_prompt", "detokenize"):
        if getattr(body, name) is False:
            raise invalid(name, "is false in a session", "true")


async def serve_turn(service: Service, request: Request, session: Session, asked: AskedTurn) -> Response:
    """Answer a turn, or attach to a running turn or repeat a closed one if this is a retry of it.

    Raises:
        HttpError: the turn failed before its first piece; 409, another service runs it.
        SessionError: the session has ended or has no room.
    """
    check_turn(asked.body)
    session = service.sessions.keep(session)
    given = request.headers.get("Idempotency-Key") or given_request_id(request.headers) or asked.body.request_id or ""
    is_again = request.headers.get("X-Stainless-Retry-Count", "0") not in ("", "0")
    # The same body may mean something else in another API.
    api = request.url.path.rpartition("/v1/")[2]
    retry = Retry(
        key=_digest(given.encode()) if given else "",
        digest=_digest(api.encode(), b"\0", asked.data),
        may_run=bool(given) or is_again,
    )
    running = next(iter(retry.find(session.running)), None)
    if running is None:
        if (turn := retry.closed_of(session)) is not None:
            kind = "text/event-stream" if turn.is_stream else "application/json"
            answer = await service.sessions.answer(session, turn)
            return Response(answer, headers=id_headers(turn.request_id), media_type=kind)
        running = RunningTurn(retry.key, retry.digest, is_stream=bool(asked.body.stream))
        service.sessions.start(_Job(service, request, session, asked, running, retry).run())
        session.running.append(running)
    return await running.response(request)


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


async def end_join(service: Service, request: Request, session: Session, leaf: Turn, deadline: float) -> str:
    """Return how a leaf's prompt was joined. If the whole was not compared with the template then, compare it now.

    A leaf whose model is not served is `unchecked`.

    Args:
        deadline: time on `time.monotonic()` until which a model may start, for all leaves together.
    """
    if leaf.join != TAIL or leaf.id in session.ends:
        return session.ends.get(leaf.id, leaf.join)
    tree = session.tree
    setting = tree.setting(leaf)
    if not setting["model"]:
        return UNCHECKED
    try:
        left_s = max(deadline - time.monotonic(), MIN_LEFT_S)
        target = await find_target(service, request, setting["model"], left_s)
        template = _template_of(await service.tokenizer(target.worker), setting, session)
        others, pieces = _others(template, session, leaf, leaf.frame), tree.pieces(leaf)
        num_equal = await asyncio.to_thread(template.check, pieces, tree.messages(leaf)[:-1], others=others)
    except (HttpError, RollbusError) as error:
        logger.info("session.end_unchecked session=%s error=%s", session.head.id, error)
        return UNCHECKED
    join = CHECKED if num_equal == len(pieces) else DIFFERS
    session.ends[leaf.id] = UNCHECKED if num_equal is None else join
    return session.ends[leaf.id]


def _template_of(tokenizer: Tokenizer, setting: JsonObject, session: Session) -> ChatTemplate:
    form = partial(template_message, "messages")
    return ChatTemplate(tokenizer, setting["tools"], setting["variables"], form, session.head.opened_at)


def _others(template: ChatTemplate, session: Session, turn: Turn, frame: str) -> list[ChatTemplate]:
    """Return the template with each setting, besides that of `frame`, of the turns up to `turn`."""
    path = session.tree.path(turn)
    settings = {each.frame: each.setting for each in path if each.setting and each.frame != frame}
    return [_template_of(template.tokenizer, each, session) for each in settings.values()]


@dataclass(frozen=True)
class Retry:
    """How the retries of a turn are recognized."""

    key: str
    """Digest of the key that the client chose; empty: the body is the key, if the client says that it repeats it."""
    digest: str
    """Digest of the API and the body."""
    may_run: bool
    """True: the turn may run already, or may be closed."""

    def find(self, turns: Iterable[Found]) -> list[Found]:
        """Return the turns that the request repeats, the last one first.

        Raises:
            HttpError: 400, the key belongs to another body.
        """
        same = [each for each in turns if not self.key or each.retry_key == self.key] if self.may_run else []
        found = [each for each in same if each.body_digest == self.digest]
        if self.key and len(found) < len(same):
            raise invalid(
                "Idempotency-Key", "belongs to a turn with another body or API", "a new key for another body or API"
            )
        return found[::-1]

    def closed_of(self, session: Session) -> Turn | None:
        """Return the complete turn that the request repeats. An interrupted one runs again.

        Raises:
            HttpError: 400, the key belongs to another body.
        """
        return next((each for each in self.find(session.tree.turns.values()) if each.is_complete), None)


@dataclass
class _Job:
    """Runs one turn."""

    service: Service
    request: Request
    session: Session
    asked: AskedTurn
    running: RunningTurn
    retry: Retry
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    served: ServedAnswers = field(default_factory=ServedAnswers)
    match: Match | None = None
    prompt: Sequence[int] = ()
    """Ids of the prompt after those of the parent."""
    join: str = WHOLE
    tokenizer: Tokenizer | None = None
    reserved: int = 0
    reserved_cost: float = 0.0
    setting: JsonObject = field(default_factory=dict)

    async def run(self) -> None:
        """Answer the turn and store it. All errors end the answer."""
        session, running = self.session, self.running
        error: HttpError | None = None
        limit = session.head.opened_at + session.head.limits.max_seconds - time.time()
        timer = asyncio.get_running_loop().call_later(max(limit, 0.0), running.stop, bus.FinishReason.LENGTH)
        try:
            if limit <= 0:
                raise SessionError("session_limit", "the session's time is over; allowed: max_seconds from its opening")
            await self.service.sessions.claim(session, running, is_retry=self.retry.may_run)
            if not await self._repeat():
                await self.service.sessions.renew(session, is_asking=True)
                await self._run()
        except HttpError as failure:
            error = failure
        except RollbusError as failure:
            error = http_error(failure)
        except RequestAborted:
            error = HttpError(409, "the request was aborted before it began", code="aborted")
        except asyncio.CancelledError:
            running.end(HttpError(503, "the service is stopping", code="stopping"))
            raise
        except Exception as failure:
            # Boundary of one turn: an error here must not end the other turns.
            logger.exception("session.turn_failed session=%s", session.head.id, exc_info=failure)
            error = HttpError(500, "the service has failed", code="internal_error")
        finally:
            timer.cancel()
            session.running.remove(running)
            session.reserved_tokens -= self.reserved
            session.reserved_cost -= self.reserved_cost
        if error is not None and running.is_stream and running.written:
            running.write(self.asked.form.fail(error))
        running.end(error)
        await self.service.sessions.release(session, running)

    async def _repeat(self) -> bool:
        """Return True if another service has closed this turn meanwhile. Its answer is then that of this turn."""
        if not self.retry.may_run:
            return False
        sessions = self.service.sessions
        self.session = await sessions.load(self.session.head.id)
        if (turn := self.retry.closed_of(self.session)) is None:
            return False
        self.running.headers = id_headers(turn.request_id)
        self.running.write(await sessions.answer(self.session, turn))
        return True

    async def _run(self) -> None:
        with ExitStack() as until_closed:
            request = detached(self.request, until_closed)
            self.service.admit(request, min(max(self.asked.body.n or 1, 1), MAX_N))
            async with self.service.preparing(request, self.asked.body.request_id):
                writer = await self._prepare(request)
            self.running.headers = id_headers(writer.requests[0].request_id)
            try:
                if self.running.is_stream:
                    await self._stream(writer, request)
                else:
                    await self._answer(writer, request)
            except (HttpError, RollbusError):
                # The client gets the error. The tokens so far stay, as an interrupted turn.
                await self._store(writer, b"", is_complete=False)
                raise

    async def _stream(self, writer: AnswerWriter, request: Request) -> None:
        last = b""
        async with aclosing(self.asked.form.events(self.service, request, writer)) as events:
            async for event in events:
                if event is PING:
                    self.running.write(event)
                    continue
                if last:
                    self.running.write(last)
                last = event
        await self._finish(writer, last + self.asked.form.done)

    async def _answer(self, writer: AnswerWriter, request: Request) -> None:
        choices = writer.make_choices(keep=True)
        async with aclosing(writer.source(self.service, request, writer.requests, choices)) as found:
            async for added in found:
                for _ in added:
                    pass
        await self._finish(writer, await self.asked.form.whole(writer, choices))

    async def _finish(self, writer: AnswerWriter, last: bytes) -> None:
        """Store the turn, and then send the last piece of its answer."""
        is_complete = not self.running.was_aborted
        await self._store(writer, last, is_complete=is_complete)
        # A turn that was closed as complete counts, even if its claim was replaced meanwhile.
        if self.running.is_lost and not is_complete:
            raise turn_running()
        self.running.write(last)

    # The prompt.

    async def _prepare(self, request: Request) -> AnswerWriter:
        self.asked.form.seal = make_seal(self.session.head.seal_key, self.turn_id)
        writer = await self.asked.form.prepare(
            self.service, request, self.asked.body, RequestClock(), self._make_prompt
        )
        head, tree = self.session.head, self.session.tree
        first = writer.requests[0]
        routing = writer.target.capabilities.routed_experts if head.routed_experts else None
        if head.routed_experts and routing is None:
            raise invalid("routed_experts", "is true for this session", "false: this model returns no routed experts")
        n = first.sampling.n
        row_bytes = 0 if routing is None else routing.num_layers * routing.top_k * (1 if routing.dtype == "u1" else 2)
        room = check_room(self.session, turns=n, new=len(self.prompt), prompt=first.prompt_len, row_bytes=row_bytes)
        wanted = (
            writer.target.room(first.prompt_len) if first.sampling.max_tokens is None else first.sampling.max_tokens
        )
        most = min(wanted, room)
        self.reserved = n * (len(self.prompt) + most)
        self.session.reserved_tokens += self.reserved
        self.reserved_cost = n * head.limits.highest_cost(first.prompt_len, most)
        self.session.reserved_cost += self.reserved_cost
        parent = None if self.match is None else self.match.parent
        logprobs = 0 if first.sampling.logprobs is None else first.sampling.logprobs
        sampling = replace(
            first.sampling, max_tokens=most, logprobs=logprobs, min_tokens=min(first.sampling.min_tokens, most)
        )
        made = replace(
            first,
            sampling=sampling,
            session_id=head.id,
            return_routed_experts=None if routing is not None else first.return_routed_experts,
            routed_experts_prompt_start=0 if routing is None else max(len(tree.token_ids(parent)) - 1, 0),
        )
        return dataclasses.replace(writer, requests=[made], served=self.served, source=self.running.source)

    async def _make_prompt(self, tokenizer: Tokenizer, target: RequestTarget) -> BodyPrompt:
        self.tokenizer = tokenizer
        tools, variables = template_tools(self.asked.body.tools), template_variables(self.asked.body)
        self.setting = {"model": target.name, "tools": tools, "variables": variables}
        template = _template_of(tokenizer, self.setting, self.session)
        history = self.asked.body.messages or []
        for index, message in enumerate(history):
            template_message(f"messages[{index}]", message)
            self._check_seal(f"messages[{index}]", message)
        self.match = self.session.tree.find(history, self.setting)
        ids = await asyncio.to_thread(self._join, template, history, self.match)
        return BodyPrompt(ids, "messages")

    def _check_seal(self, field: str, message: JsonObject) -> None:
        """Check that signed reasoning is as it was served.

        Raises:
            HttpError: 400, the signature is not of this session, or the reasoning was edited.
        """
        seal, head = message.get("seal"), self.session.head
        if seal in (None, "", UNSEALED):
            return
        turn = self.session.tree.turns.get(turn_of_seal(message))
        if turn is None or not hmac.compare_digest(str(seal).encode(), make_seal(head.seal_key, turn.id).encode()):
            raise invalid(f"{field}.signature", "is not of this session", "a signature that this session served")
        given, served = message.get("reasoning") or "", turn.answer.get("reasoning") or ""
        if given.strip() not in ("", served.strip()):
            raise invalid(f"{field}.reasoning", "is not what was signed", "the reasoning as it was served, or none")

    def _join(self, template: ChatTemplate, history: Sequence[JsonObject], found: Match) -> list[int]:
        """Return the ids of the prompt: those of the parent and the new messages, or a rendering of all."""
        tree, fork = self.session.tree, found.fork
        for match in (found.other, found):
            if match is None or match.parent is None:
                continue
            parent, new = match.parent, list(history[match.index :])
            before = tree.messages(parent)
            try:
                tail = template.tail(parent.answer, parent.ended_by, new, before[:-1])
            except CannotJoin as error:
                problem: Fork | None = Fork(message=match.index, field=str(error))
            else:
                problem = self._check(template, match, tail, [*before, *new])
                if problem is None:
                    self.match, self.prompt = match, tail
                    return [*tree.token_ids(parent).tolist(), *tail]
            fork = problem if match is found else fork
        self.match, self.join = Match(None, 0, fork), WHOLE
        self.prompt = template.whole(history)
        return list(self.prompt)

    def _check(self, template: ChatTemplate, match: Match, tail: list[int], messages: list[JsonObject]) -> Fork | None:
        """Return why the prompt is not what the template makes of the messages; None: it is, or was not compared."""
        tree, is_strict = self.session.tree, self.session.head.reasoning == "template"
        path, pieces = tree.path(match.parent), [*tree.pieces(match.parent), tail]
        self.join, frame = TAIL, frame_of(self.setting)
        is_due = not len(pieces) & (len(pieces) - 1) or path[-1].frame != frame
        if not is_due and not is_strict:
            return None
        others = _others(template, self.session, path[-1], frame)
        num_equal = template.check(pieces, messages, others=others)
        if num_equal == len(pieces) and is_strict:
            kept = [turn.answer.get("reasoning") or "" for turn in path]
            if template.check(pieces, messages, kept, others) not in (None, len(pieces)):
                return Fork(message=match.index, field="reasoning_dropped")
        self.join = UNCHECKED if num_equal is None else CHECKED
        # A prompt of other tools or variables must be known to be equal: it may lack the new ones.
        if num_equal == len(pieces) or (num_equal is None and path[-1].frame == frame):
            return None
        return Fork(message=sum(turn.num_messages for turn in path[:num_equal]), field="template")

    # The closed turn.

    async def _store(self, writer: AnswerWriter, last: bytes, *, is_complete: bool) -> None:
        """Store the answers that have tokens, with the pieces that were written and the last one."""
        request, answer = writer.requests[0], b"".join([*self.running.written, last])
        claim = self.running.claim[0] if self.running.claim is not None and is_complete else None
        frame = frame_of(self.setting) if self.setting else ""
        for choice in self.served.choices:
            # A request's id is its client's choice, and may be used again.
            tokens = self.served.tokens(choice)
            if tokens is None or not len(tokens.ids) or self.match is None or self.tokenizer is None:
                continue
            rows = tokens.rows if self.session.head.routed_experts else None
            parent = self.match.parent
            turn = Turn(
                # The same ids if this is called again after an error: a stored turn is not stored twice.
                id=uuid.uuid5(uuid.UUID(self.turn_id), str(choice.index)).hex if choice.index else self.turn_id,
                request_id=request.request_id,
                parent=None if parent is None else parent.id,
                messages=list((self.asked.body.messages or [])[self.match.index :]),
                answer=self.served.message(choice),
                frame=frame,
                setting=self.setting if parent is None or parent.frame != frame else None,
                prompt_ids=ids_bytes(list(self.prompt)),
                token_ids=ids_bytes(tokens.ids),
                logprobs=np.asarray(tokens.scores.logprobs, "<f4").tobytes(),
                weight_versions=ids_bytes(tokens.weight_versions),
                lora_versions=b"" if tokens.lora_versions is None else ids_bytes(tokens.lora_versions),
                kv_from=tokens.kv_from,
                finish_reason=str(choice.finish_reason or "error"),
                ended_by=self._ended_by(choice, int(tokens.ids[-1])),
                is_complete=is_complete,
                fork=self.match.fork,
                join=self.join,
                attempts=tokens.attempt + 1,
                cost=self.session.head.limits.cost(request.prompt_len, choice.cached_tokens or 0, len(tokens.ids)),
                num_rows=0 if rows is None else len(rows),
                rows_start=request.routed_experts_prompt_start,
                served_at=time.time(),
                retry_key=self.retry.key,
                body_digest=self.retry.digest,
                is_stream=self.running.is_stream,
            )
            await self.service.sessions.close_turn(self.session, turn, rows, answer, claim)
            claim = None

    def _ended_by(self, choice: AnswerChoice, last: int) -> str:
        """Return the text of the special token that ended an answer."""
        if choice.finish_reason != bus.FinishReason.STOP or isinstance(choice.stop_reason, str) or not self.tokenizer:
            return ""
        is_added = last in self.tokenizer.wrapped.added_tokens_decoder
        return self.tokenizer.decode([last], skip_special_tokens=False) if is_added else ""
