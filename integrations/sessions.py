"""A client of agents' sessions for trainers: it opens one over HTTP, and returns its samples for training.

async with open_session("http://127.0.0.1:8080", routed_experts=True) as session:
agent = openai.AsyncOpenAI(base_url=session.url, api_key=session.api_key)
...
samples = await session.samples()
"""

import asyncio
import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..bus.client.record_writer import RunRecorder
from ..schemas.errors import RollbusError
from ..trainer.errors import PackError, check_integer
from ..trainer.losses import group_advantages
from ..trainer.stitching import Sample

TIMEOUT_S: Final = 300.0
"""Seconds for each read: the rows of a long sample have a hundred megabytes."""

ARRAYS: Final = ("token_ids", "loss_mask", "logprobs", "weight_versions")
"""Fields of an answer that are arrays of its sample."""


class SessionFailed(RollbusError):
    """The service rejected a call.

    Attributes:
        code: code of the error, for example `session_limit`.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSample:
    """The sample of one leaf of a session."""

    sample: Sample
    """Tokens, mask, log probabilities, versions and rows."""
    details: Mapping[str, Any]
    """The other fields of the answer: `leaf`, `turns`, `turn_of_token`, `reward`, `forks`, `joins`, `attempts`,
    `kv_version_spans` and `messages`."""

    @property
    def reward(self) -> float | None:
        """The reward of the leaf, or else of the session; None: none was set."""
        reward: float | None = self.details["reward"]
        return reward


@dataclass(frozen=True, slots=True)
class AgentSession:
    """An open session."""

    id: str
    url: str
    """Base URL for the agent's client."""
    api_key: str
    """Key for the agent's client."""
    _service: str
    _token: str | None

    async def samples(self, *, interrupted: bool = False) -> list[SessionSample]:
        """Return the sample of each leaf. Each is one read, so that no answer has the rows of several.

        Args:
            interrupted: True: turns that their client left count as leaves.

        Raises:
            SessionFailed: rows are missing, or the session's retention has ended.
        """
        flag = str(interrupted).lower()
        path = f"/v1/rl/sessions/{self.id}/samples?interrupted={flag}"
        leaves = (await self._call("GET", f"{path}&rows=false"))["samples"]
        return [
            _sample(each)
            for leaf in leaves
            for each in (await self._call("GET", f"{path}&leaf={leaf['leaf']}"))["samples"]
        ]

    async def record(self, recorder: RunRecorder, *, interrupted: bool = False) -> list[SessionSample]:
        """Add the sample of each leaf to the record of a run, which becomes parquet files. Return the samples.

        `rollbus.read_record(folder).sessions()` reads them.

        Args:
            recorder: a record, for example of `rb.record(folder, experts=True)`. Its memory is bounded.
            interrupted: as for `samples`.
        """
        samples = await self.samples(interrupted=interrupted)
        for each in samples:
            arrays = {name: getattr(each.sample, name) for name in ARRAYS}
            texts = {name: json.dumps(each.details[name]) for name in ("messages", "forks")}
            row = {**each.details, **arrays, **texts, "session": self.id}
            await recorder.wait_for_room()
            recorder.add_session(row, each.sample.routed_experts)
        return samples

    async def set_reward(self, reward: float, turn: str | None = None) -> None:
        """Set the reward of the session, or of a turn.

        Raises:
            SessionFailed: there is no such turn, or the session's retention has ended.
        """
        await self._call("POST", f"/v1/rl/sessions/{self.id}/rewards", {"reward": reward, "turn": turn})

    async def end(self) -> None:
        """End the session. Its samples stay for its retention."""
        await self._call("DELETE", f"/v1/rl/sessions/{self.id}")

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        return await _call(self._service, self._token, method, path, body)


@asynccontextmanager
async def open_session(service: str, *, token: str | None = None, **limits: Any) -> AsyncIterator[AgentSession]:
    """Open a session for the block, and end it after the block.

    Args:
        service: URL of the HTTP service.
        token: bearer token of the data routes, if the service has one.
        limits: fields of `POST /v1/rl/sessions`, for example `max_turns=50` or `routed_experts=True`.

    Raises:
        SessionFailed: the service rejects a field, has no room, or does not answer.
    """
    opened = await _call(service, token, "POST", "/v1/rl/sessions", limits)
    session = AgentSession(opened["id"], opened["base_url"], opened["api_key"], service, token)
    try:
        yield session
    finally:
        await session.end()


async def run_group(
    service: str, agent: Callable[[AgentSession], Awaitable[float]], *, n: int, token: str | None = None, **limits: Any
) -> list[SessionSample]:
    """Run an agent in n sessions at the same time. Return the samples of all leaves with the group's advantages.

    All leaves of a session have its reward and advantage. If an agent fails, the others are cancelled and all sessions
    end.

    Args:
        agent: called once with each open session; returns its reward.
        n: number of sessions, at least 1.
        token: as in `open_session`.
        limits: as in `open_session`.

    Raises:
        PackError: `n` is less than 1.
        ExceptionGroup: an agent failed, or a call of its session (`SessionFailed`).
    """
    check_integer(PackError, "n", n, 1)

    async def run_member() -> tuple[float, list[SessionSample]]:
        async with open_session(service, token=token, **limits) as session:
            reward = float(await agent(session))
            await session.set_reward(reward)
            return reward, await session.samples()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run_member()) for _ in range(n)]
    members = [task.result() for task in running]
    advantages = group_advantages([reward for reward, _ in members])
    return [
        replace(each, sample=replace(each.sample, advantage=float(advantage)))
        for advantage, (_, samples) in zip(advantages, members, strict=True)
        for each in samples
    ]


async def _call(service: str, token: str | None, method: str, path: str, body: object = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{service.rstrip('/')}{path}", data, headers, method=method)

    def read() -> Any:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    try:
        return await asyncio.to_thread(read)
    except urllib.error.HTTPError as error:
        try:
            found = json.load(error)["error"]
            code, message = str(found["code"]), str(found["message"])
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            code, message = "http_error", f"{method} {path} was answered {error.code}"
        raise SessionFailed(code, message) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise SessionFailed("unreachable", f"the service {service} cannot be used: {error}") from error


def _sample(given: dict[str, Any]) -> SessionSample:
    rows, packed = None, given.pop("routed_experts")
    if packed is not None:
        dtype = {"uint8": "u1", "uint16": "<u2"}[packed["dtype"]]
        rows = np.frombuffer(base64.b64decode(packed["data"], validate=True), dtype).reshape(packed["shape"])
    sample = Sample(
        token_ids=np.array(given.pop("token_ids"), np.int32),
        loss_mask=np.array(given.pop("loss_mask"), np.bool_),
        logprobs=np.array(given.pop("logprobs"), np.float32),
        weight_versions=np.array(given.pop("weight_versions"), np.int32),
        routed_experts=rows,
    )
    return SessionSample(sample=sample, details=given)
