"""The routes of sessions. The owner opens, reads, rewards and ends them; the agent sends turns with a key."""

import math
import secrets
import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ...sessions.samples import Shape, join_rows, leaf_sample, rllm_traces, verifiers_trace
from ...sessions.tree import SessionError
from .. import status
from ..access import given_tokens
from ..agents import messages, responses
from ..agents.format import MESSAGES, RESPONSES
from ..agents.message_blocks import message_error
from ..agents.routes import count_tokens, read_turn
from ..agents.turns import renamed_errors
from ..body import decode_body, read_body
from ..calls import JsonPieces, json_response, object_json, objects_json
from ..control.bodies import read_query
from ..errors import HttpError, invalid
from ..openai.body import ChatBody
from ..openai.routes import AskedTurn, ChatFormat
from ..service import HttpRoute, RouteTable, Service
from ..tokens import routed_experts_json
from .manager import KEY, Session, digest_of, has_key, wrong_key
from .store import Policy, SessionHead, SessionLimits
from .turns import END_TIMEOUT_S, end_join, serve_turn

OF_TURNS: Final = ("id", "request_id", "parent", "finish_reason", "num_sampled", "is_complete", "join", "fork")
"""What the answers about a session have of each turn."""


class OpenBody(SessionLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new session. All fields have defaults."""

    reasoning: Policy = "keep"
    """`keep`: sampled reasoning stays in the context. `template`: fork where the chat template drops it."""
    routed_experts: bool = False
    """True: keep the routed experts of all tokens, for router replay."""


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
        turns=[{name: getattr(turn, name) for name in OF_TURNS} for turn in tree.turns.values()],
        **more,
    )


async def _load(service: Service, request: Request, *, renews: bool = False) -> Session:
    session = await service.sessions.load(request.path_params["session"])
    if renews and not session.head.is_over(time.time()):
        await service.sessions.renew(session)
    return session


async def get_session(service: Service, request: Request) -> Response:
    """Return a session and its turns. This renews its lease."""
    return json_response(_answer(await _load(service, request, renews=True)))


async def end_session(service: Service, request: Request) -> Response:
    """End a session. Running turns stop and keep their tokens; later turns are answered 410."""
    session = await _load(service, request)
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
    await service.sessions.set_reward(session, body.turn, body.reward)
    return json_response(_answer(session))


async def read_samples(service: Service, request: Request) -> Response:
    """Return a sample for each leaf: its tokens, which of them were sampled, by which weights, and their experts.

    With `shape`, return what rllm's gateway and verifiers have. With `leaf`, return one sample, so that an
    answer is bounded. This renews the session's lease.
    """
    query, deadline = read_query(request, SamplesQuery), time.monotonic() + END_TIMEOUT_S
    session = await _load(service, request, renews=True)
    leaves = session.tree.leaves(interrupted=query.interrupted)
    if query.leaf is not None:
        leaves = [turn for turn in leaves if turn.id == query.leaf]
        if not leaves:
            raise invalid("leaf", f"is {describe(query.leaf)}", "the id of a leaf of this session")
    head, tree = session.head, session.tree
    if query.shape == "rllm":
        return JsonPieces(objects_json(rllm_traces(tree, leaves, head.id)), {})
    if query.shape == "verifiers":
        return json_response(verifiers_trace(tree, leaves, head.id, head.reward))
    with_rows = head.routed_experts and query.rows
    found = []
    for leaf in leaves:
        path, join = tree.path(leaf), await end_join(service, request, session, leaf, deadline)
        rows = join_rows(path, await service.sessions.rows(session, path)) if with_rows else None
        found.append((leaf, join, None if rows is None else routed_experts_json(rows, 0)))
    samples = (
        msgspec.structs.asdict(leaf_sample(tree, leaf, head.rewards, head.reward, join)) | {"routed_experts": rows}
        for leaf, join, rows in found
    )
    return JsonPieces(object_json({"samples": objects_json(samples)}), {})


async def session_chat(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in OpenAI's API. The bearer token is the session's key."""
    session = await _with_key(service, request)
    data = await read_body(request, service.settings)
    return await serve(service, request, session, AskedTurn(decode_body(data, ChatBody), data, ChatFormat()))


async def session_response(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in OpenAI's Responses API.

    `input` has the whole history, or what follows a response of the session, `previous_response_id`.
    """
    session = await _with_key(service, request)
    asked, _ = await read_turn(service, request, RESPONSES, session)
    return await serve(service, request, session, asked)


async def session_message(service: Service, request: Request) -> Response:
    """Answer a turn of a session, as in Anthropic's API. The header `x-api-key` may have the session's key."""
    session = await _with_key(service, request)
    asked, _ = await read_turn(service, request, MESSAGES, session)
    return await serve(service, request, session, asked)


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
    except SessionError:
        raise wrong_key() from None
    if not any(has_key(session.head, given) for given in given_tokens(request)):
        raise wrong_key()
    return session


async def serve(service: Service, request: Request, session: Session, asked: AskedTurn) -> Response:
    """Answer a turn of a session, or of an ordinary route that names one.

    Raises:
        HttpError: the turn failed before its first piece; 410, the session has ended.
    """
    with renamed_errors(asked.form.names):
        return await serve_turn(service, request, session, asked)


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
