"""Converts traces of verifiers into training samples, with the weight version of each token.

    with weight_versions():
        async with env.serving():
            episode = await env.run_slot(slot, ModelContext(model="policy", client=TrainClientConfig(base_url=...)))
    batch = [sample for trace in episode.traces for sample in samples(trace)]

The `TrainClient` of verifiers reads token ids, log probabilities and routed experts from the HTTP service, and ignores
the versions. Inside the block, this module stores the versions in `trace.info`, which is part of the trace. Written for
verifiers 0.4.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
from msgspec import Meta
from verifiers.v1.clients import Client, TrainClient, TrainClientConfig, resolve_client
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.interception import server
from verifiers.v1.trace import Branch, Trace
from verifiers.v1.types import Response

from ..trainer.errors import PackError
from ..trainer.stitching import NOT_SAMPLED, Sample

INFO = "weight_versions"
"""Key in `trace.info`: versions of the tokens of each answer, by a digest of the token ids up to the answer's end."""
GENERATE = "/inference/v1/generate"


class _VersionsChoice(msgspec.Struct):
    weight_versions: list[int]


class _VersionsAnswer(msgspec.Struct):
    choices: Annotated[list[_VersionsChoice], Meta(min_length=1)]


_answered: ContextVar[list[list[int]]] = ContextVar("_answered")
"""Versions in the service's answers to the present call."""


@contextmanager
def weight_versions() -> Iterator[None]:
    """Make traces store the versions of tokens, for clients that are created inside the block in this process."""
    before = server.resolve_client
    server.resolve_client = _resolve
    try:
        yield
    finally:
        server.resolve_client = before


def samples(trace: Trace, *, advantage: float = 0.0) -> list[Sample]:
    """Return one sample for each branch of the conversation that verifiers marks as trainable.

    Raises:
        PackError: the trace has sampled tokens without versions.
    """
    return [_sample(trace, branch, advantage) for branch in trace.branches if branch.trainable]


def _sample(trace: Trace, branch: Branch, advantage: float) -> Sample:
    recorded: Mapping[str, list[int]] = trace.info.get(INFO, {})
    versions: list[int] = []
    digest = hashlib.blake2b(digest_size=16)
    for node in branch.nodes:
        digest.update(_bytes(node.token_ids))
        versions += [NOT_SAMPLED] * len(node.token_ids)
        if count := sum(node.mask):
            found = recorded.get(digest.hexdigest(), [])
            if len(found) != count:
                raise PackError(
                    f"trace {trace.id} has the weight versions of {len(found)} of {count} tokens of an answer; "
                    "allowed: all, as in traces made with `weight_versions()` and rollbus's HTTP service"
                )
            versions[-count:] = found
    rows = branch.routed_experts
    return Sample(
        token_ids=np.array(branch.token_ids, np.int32),
        loss_mask=np.array(branch.sampled_mask, np.bool_),
        logprobs=np.array(branch.logprobs, np.float32),
        weight_versions=np.array(versions, np.int32),
        # verifiers copies a row for the last token, which did not pass through the model.
        routed_experts=None if rows is None else rows[:-1],
        advantage=advantage,
    )


def _resolve(config: Any) -> Client:
    return _RecordingClient(config) if isinstance(config, TrainClientConfig) else resolve_client(config)


class _RecordingClient(TrainClient):  # type: ignore[misc] # verifiers is not there for mypy
    """The client of verifiers, which also stores the versions in the service's answers."""

    def __init__(self, config: TrainClientConfig) -> None:
        super().__init__(config)
        http = build_async_httpx(config)
        http.event_hooks["response"].append(_note)
        self.client: Any = self.client.with_options(http_client=http)

    async def get_response(self, *args: Any, turn: Any = None, **kwargs: Any) -> Response:
        """Return the response, and store the versions of its tokens in the trace."""
        answered: list[list[int]] = []
        token = _answered.set(answered)
        try:
            response = await super().get_response(*args, turn=turn, **kwargs)
        finally:
            _answered.reset(token)
        if turn is not None and response.tokens is not None and answered:
            sequence = [*response.tokens.prompt_ids, *response.tokens.completion_ids]
            key = hashlib.blake2b(_bytes(sequence), digest_size=16).hexdigest()
            turn.trace.info.setdefault(INFO, {})[key] = answered[-1]
        return response


async def _note(response: httpx.Response) -> None:
    if not response.request.url.path.endswith(GENERATE) or response.status_code != httpx.codes.OK:
        return
    try:
        answer = msgspec.json.decode(await response.aread(), type=_VersionsAnswer)
    except msgspec.DecodeError:
        return  # the answer of another service: `samples` reports the missing versions
    _answered.get().append(answer.choices[0].weight_versions)


def _bytes(token_ids: list[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()
