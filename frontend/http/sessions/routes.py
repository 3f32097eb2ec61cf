"""The routes of sessions. The owner opens, reads, rewards and ends them; the agent sends turns with a key."""

import math
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ....bus.control.session_bucket import MAX_AGE_S
from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ...sessions.errors import SessionError
from ...sessions.samples import Shape, join_rows, leaf_sample, rllm_traces, verifiers_trace
from .. import status
from ..access import given_tokens
from ..agents import messages, responses
from ..agents.format import MESSAGES, RESPONSES
from ..agents.message_blocks import message_error
from ..agents.routes import count_tokens, read_turn
from ..agents.turns import renamed_errors
from ..body import decode_body, read_body
from ..calls import JsonPieces, json_response
from ..control.bodies import read_query
from ..errors import HttpError, invalid
from ..openai.body import ChatBody
from ..openai.routes import AskedTurn, ChatFormat
from ..service import HttpRoute, RouteTable, Service
from ..tokens import routed_experts_json
from .manager import Session, digest_of, has_key, http_error_of
from .store import Policy, SessionHead, SessionLimits
from .turns import end_join, serve_turn

Seconds = Annotated[float, Meta(gt=0, le=MAX_AGE_S / 4)]
Price = Annotated[float, Meta(ge=0, le=1e12)]
KEY: Final = "sk-session-"
"""Begins the key of each session."""


class OpenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new session. All fields have defaults."""

    reasoning: Policy = "keep"
    """`keep`: sampled reasoning stays in the context. `template`: fork where the chat template drops it."""
    routed_experts: bool = False
    """True: keep the routed experts of all tokens, for router replay."""
    max_turns: Annotated[int, Meta(ge=1, le=4096)] = 1000
    max_tokens: Annotated[int, Meta(ge=1, le=8_000_000)] = 1_000_000
    """Tokens of all branches. A shared prefix counts once."""
    max_seconds: Seconds = 24 * 3600.0
    max_row_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 256 << 20
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


class SessionAnswer(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One session."""

    id: str
    is_open: bool
    num_turns: int
    num_tokens: int
    row_bytes: int
    cost: float
    """Sum of the costs of all turns, by the prices of the opening."""
    turns: list[JsonObject]
    """For each turn: its id, parent, finish reason, sampled tokens, and why it forked."""
    base_url: str = ""
    """URL for clients of OpenAI. Only in the answer to the opening."""
    api_key: str = ""
    """Key of the session. Only in the answer to the opening."""


class RewardBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward of the session, or of one turn, which may be a leaf."""

    reward: float
    turn: str | None = None


class SamplesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which samples are read, and how."""

    leaf: str | None = None
    """Id of a leaf. None: all leaves."""
    rows: bool = True
    """False: leave out the routed experts."""
    interrupted: bool = False
    """True: turns that their client left count as leaves."""
    shape: Shape = "rollbus"


async def open_session(service: Service, request: Request) -> Response:
    """Open a session for an agent. The answer has its base URL and key, which are shown only here."""
    body = decode_body(await read_body(request, service.settings), OpenBody)
    if body.max_cost is not None and not (body.prompt_price or body.sampled_price):
        raise invalid("max_cost", "is given without a price", "a prompt_price or sampled_price above 0 with it")
    key, now = f"{KEY}{secrets.token_urlsafe(32)}", time.time()
    limits = {name: getattr(body, name) for name in SessionLimits.__struct_fields__}
    head = SessionHead(
        id=f"ses-{secrets.token_hex(16)}",
        key_digest=digest_of(key),
        seal_key=secrets.token_hex(16),
        opened_at=now,
        used_at=now,
        limits=SessionLimits(**limits),
        reasoning=body.reasoning,
        routed_experts=body.routed_experts,
    )
    try:
        await service.sessions.open(head)
    except SessionError as error:
        # The fleet has no room now. Another session may end.
        raise HttpError(429, str(error), code=error.code) from error
    base_url = f"{str(request.base_url).rstrip('/')}/sessions/{head.id}/v1"
    return json_response(_answer(Session(head), base_url=base_url, api_key=key))


def _answer(session: Session, **more: str) -> SessionAnswer:
    head, tree = session.head, session.tree
    return SessionAnswer(
        id=head.id,
        is_open=not head.is_over(time.time()),
        num_turns=len(head.turns),
        num_tokens=tree.num_tokens,
        row_bytes=head.row_bytes,
        cost=tree.cost,
        turns=[
            {
                "id": turn.id,
                "request_id": turn.request_id,
                "parent": turn.parent,
                "finish_reason": turn.finish_reason,
                "num_sampled": turn.num_sampled,
                "is_complete": turn.is_complete,
                "join": turn.join,
                "fork": turn.fork,
            }
            for turn in tree.turns.values()
        ],
        **more,
    )


async def _load(service: Service, request: Request) -> Session:
    with _http_errors():
        return await service.sessions.load(request.path_params["session"])


@contextmanager
def _http_errors() -> Iterator[None]:
    try:
        yield
    except SessionError as error:
        raise http_error_of(error) from error


async def get_session(service: Service, request: Request) -> Response:
    """Return a session and its turns. This renews its lease."""
    session = await _load(service, request)
    if not session.head.is_over(time.time()):
        with _http_errors():
            await service.sessions.renew(session)
    return json_response(_answer(session))


async def end_session(service: Service, request: Request) -> Response:
    """End a session. Running turns stop and keep their tokens; later turns are answered 410."""
    session = await _load(service, request)
    with _http_errors():
        await service.sessions.end(session)
    return json_response(_answer(session))


async def set_reward(service: Service, request: Request) -> Response:
    """Set the reward of a session or a turn. This is possible until its retention has ended."""
    body = decode_body(await read_body(request, service.settings), RewardBody)
    if not math.isfinite(body.reward):
        raise invalid("reward", f"is {body.reward}", "finite numbers")
    session = await _load(service, request)
    if body.turn is not None and body.turn not in session.tree.turns:
        raise invalid("turn", f"is {describe(body.turn)}, which is unknown", "the id of a turn of this session")
    with _http_errors():
        await service.sessions.set_reward(session, body.turn, body.reward)
    return json_response(_answer(session))


async def read_samples(service: Service, request: Request) -> Response:
    """Return a sample for each leaf: its tokens, which of them were sampled, by which weights, and their experts.

    With `shape`, return what rllm's gateway and verifiers have. With `leaf`, return one sample, so that an
    answer is bounded.
    """
    query = read_query(request, SamplesQuery)
    session = await _load(service, request)
    leaves = session.tree.leaves(interrupted=query.interrupted)
    if query.leaf is not None:
        leaves = [turn for turn in leaves if turn.id == query.leaf]
        if not leaves:
            raise invalid("leaf", f"is {describe(query.leaf)}", "the id of a leaf of this session")
    head, tree = session.head, session.tree
    if query.shape == "rllm":
        return json_response(rllm_traces(tree, leaves, head.id))
    if query.shape == "verifiers":
        return json_response(verifiers_trace(tree, leaves, head.id, head.reward))
    with_rows = head.routed_experts and query.rows
    pieces: list[Iterator[bytes]] = []
    for leaf in leaves:
        join = await end_join(service, request, session, leaf)
        sample = leaf_sample(tree, leaf, head.rewards, head.reward, join)
        path = tree.path(leaf)
        with _http_errors():
            rows = join_rows(path, await service.sessions.rows(session, path)) if with_rows else None
        own = msgspec.json.encode(sample)[:-1] + b',"routed_experts":'
        of_rows: Iterator[bytes] = iter((b"null",)) if rows is None else routed_experts_json(rows, 0)
        pieces.append(chain((b"," if pieces else b"", own), of_rows, (b"}",)))
    return JsonPieces(chain((b'{"samples":[',), chain.from_iterable(pieces), (b"]}",)), {})


async def session_chat(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in OpenAI's API. The bearer token is the session's key."""
    session = await _with_key(service, request)
    data = await read_body(request, service.settings)
    return await _turn(service, request, session, AskedTurn(decode_body(data, ChatBody), data, ChatFormat()))


async def session_response(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in OpenAI's Responses API.

    `input` has the whole history, or what follows a response of the session, `previous_response_id`.
    """
    session = await _with_key(service, request)

    def find_served(response: str) -> list[JsonObject]:
        for turn in reversed(session.tree.turns.values()):
            if response == f"resp_{turn.request_id}":
                return session.tree.messages(turn)
        raise invalid("previous_response_id", f"is {describe(response)}", "a response of this session")

    return await _turn(service, request, session, await read_turn(service, request, RESPONSES, find_served))


async def session_message(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in Anthropic's API. The header `x-api-key` may have the session's key."""
    session = await _with_key(service, request)
    return await _turn(service, request, session, await read_turn(service, request, MESSAGES))


async def session_count_tokens(service: Service, request: Request) -> Response:
    """Return the number of prompt tokens of a message outside of a session. A turn may have a few more or fewer."""
    await _with_key(service, request)
    return await count_tokens(service, request)


async def session_models(service: Service, request: Request) -> Response:
    """Return the served models to an agent of a session."""
    await _with_key(service, request)
    return await status.models(service, request)


async def _with_key(service: Service, request: Request) -> Session:
    """Return the session of a request.

    Raises:
        HttpError: 401, the key is not that of the session, or there is no such session: both look the same.
    """
    try:
        session = await service.sessions.load(request.path_params["session"])
    except SessionError as error:
        if error.code != "unknown_session":
            raise http_error_of(error) from error
        session = None
    if session is None or not any(has_key(session.head, given) for given in given_tokens(request)):
        raise _wrong_key()
    return session


def _wrong_key() -> HttpError:
    return HttpError(
        401,
        "the session is unknown, or the token is not its key; allowed: Authorization: Bearer KEY, x-api-key: KEY",
        code="unauthorized",
        headers={"WWW-Authenticate": "Bearer"},
    )


async def _turn(service: Service, request: Request, session: Session, asked: AskedTurn) -> Response:
    with renamed_errors(asked.form.names), _http_errors():
        return await serve_turn(service, request, session, asked)


async def join_session(service: Service, request: Request, name: str, asked: AskedTurn) -> Response | None:
    """Answer a chat of an ordinary route that names a session; None: no such session is open, so the name is a hint.

    The data token, which the ordinary routes require, may read and end every session. So it may also join them. But a
    request that has the key of a session may only join that one.

    Raises:
        HttpError: the turn failed before its first piece; 401, the key is that of another session; 410, the session has
            ended.
    """
    try:
        session = await service.sessions.load(name)
    except SessionError as error:
        if error.code == "unknown_session":
            return None
        raise http_error_of(error) from error
    if any(given.startswith(KEY) and not has_key(session.head, given) for given in given_tokens(request)):
        raise _wrong_key()
    return await _turn(service, request, session, asked)


PATH: Final = "/v1/rl/sessions/{session}"
KEY_PATH: Final = "/sessions/{session}/v1"
ROUTES: RouteTable = {
    ("POST", "/v1/rl/sessions"): HttpRoute(open_session, OpenBody, SessionAnswer),
    ("GET", PATH): HttpRoute(get_session, answer=SessionAnswer),
    ("DELETE", PATH): HttpRoute(end_session, answer=SessionAnswer),
    ("GET", f"{PATH}/samples"): HttpRoute(read_samples, query=SamplesQuery),
    ("POST", f"{PATH}/rewards"): HttpRoute(set_reward, RewardBody, SessionAnswer),
}
"""Routes of the owner."""
KEY_ROUTES: RouteTable = {
    ("POST", f"{KEY_PATH}/chat/completions"): HttpRoute(session_chat, ChatBody),
    ("POST", f"{KEY_PATH}/responses"): HttpRoute(session_response, responses.ResponsesBody),
    ("POST", f"{KEY_PATH}/messages"): HttpRoute(session_message, messages.MessagesBody, errors=message_error),
    ("POST", f"{KEY_PATH}/messages/count_tokens"): HttpRoute(
        session_count_tokens, messages.CountTokensBody, errors=message_error
    ),
    ("GET", f"{KEY_PATH}/models"): HttpRoute(session_models, answer=status.ModelList),
}
"""Routes of the agent, which need the session's key."""
