"""The answers of workers to telemetry reads: the load of experts, and the history of single requests.

Workers publish these data only on request. An admin or a frontend sends `read_experts` or `read_request`, and each
worker answers with one `Ack`. Reads change nothing, are not recorded, and do not wait for other commands.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from . import limits
from .limits import Count, ErrorText, Name, Seconds, Version

COUNT_DTYPE: Final = "<u8"
"""Dtype of each expert's count."""


class TokenTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The number of computed positions, and how many of them the expert counts cover."""

    computed: Count = 0
    """Positions that the engine computed; a recomputed position counts again."""
    seen: Count = 0
    """Computed positions whose routed experts the worker received. Excluded are positions below `start` and requests
    that declined routed experts."""


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of how often one worker's router chose each expert under one weight version."""

    weight_version: Version
    """Version of the weights whose router chose the experts."""
    prompt: Annotated[bytes, Meta(max_length=limits.MAX_EXPERT_COUNTS_BYTES)] = b""
    """Choices at computed prompt positions: zlib of <u8[num_layers, num_experts]. Empty: none."""
    generated: Annotated[bytes, Meta(max_length=limits.MAX_EXPERT_COUNTS_BYTES)] = b""
    """Choices at generated tokens, in the same form."""
    prompt_tokens: TokenTally = TokenTally()
    """Computed and counted prompt positions."""
    generated_tokens: TokenTally = TokenTally()
    """Computed and counted generated tokens."""


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to `read_experts`.

    A worker counts in intervals of 5 s. An interval number is Unix time / 5 s by the worker's clock as of the start of
    the incarnation. The worker keeps the last 24 completed intervals.
    """

    number: Count
    """Number of the last completed interval."""
    first: Count
    """Number of the first interval in `counts`. It is later than requested if the worker has dropped intervals or
    started later. It is `number` + 1 if no requested interval is complete."""
    seconds: Seconds
    """Total seconds of the intervals in `counts`; for `window` `versions`, seconds since the first token."""
    num_layers: Annotated[int, Meta(ge=1, le=limits.MAX_LAYERS)]
    """Layers of the model that have a router."""
    num_experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    """Experts in each layer."""
    top_k: Annotated[int, Meta(ge=1, le=limits.MAX_TOP_K_EXPERTS)]
    """Experts that each position chooses in each layer."""
    counts: Annotated[tuple[ExpertCounts, ...], Meta(max_length=limits.MAX_EXPERT_VERSIONS)] = ()
    """Counts for each weight version, newest first; empty without tokens."""


TimelineEventName = Literal[
    "published",
    "offered",
    "started",
    "prefilled",
    "first_token",
    "held",
    "resumed",
    "weights",
    "restarted",
    "ended",
    "lost",
]
"""`published`: in the queue, by the server's clock. `offered`: the worker has accepted the request. `started`: the
engine has the request. `prefilled`: the prompt is computed. `held` and `resumed`: a pause. `weights`: tokens of another
weight version begin. `restarted`: the engine recomputes the prompt. `lost`: the client has lost the attempt; only in
attempts that no worker reports."""


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a request at a worker."""

    at: Annotated[float, Meta(ge=0, le=limits.MAX_UNIX_S)]
    """Unix time in seconds, by the worker's clock."""
    event: Name
    """A `TimelineEventName`. Readers skip names that newer workers have appended."""
    weight_version: Version | None = None
    """With `offered` and `weights`: version of the weights from here on."""
    tokens: Count | None = None
    """With `held`, `weights`, `restarted` and `ended`: tokens generated so far; with `prefilled`: prompt tokens."""
    cached_tokens: Count | None = None
    """With `prefilled`: prompt tokens that the engine had in its cache."""
    reason: ErrorText | None = None
    """With `ended`: finish reason, error code, or `returned` (to the queue).
    With `held`: the cause of the pause, which is `pause`, `weights` or `lora`."""


RequestKind = Literal["running", "slowest", "failed", "resumed"]
"""`running`: in flight, the longest time without a token first. `slowest`: in flight or ended, the longest first.
`failed`: ended with an error that the client does not retry, the last first. `resumed`: continued after the loss of an
attempt, the last first."""


class RequestProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a request in flight."""

    seconds: Seconds
    """Seconds since the first event."""
    idle_s: Seconds = 0.0
    """Seconds since the last token, or since the offer before the first token."""
    tokens: Count = 0
    """Tokens generated so far."""


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request at an HTTP service that no worker has."""

    request_id: Annotated[str, Meta(max_length=limits.MAX_GIVEN_ID_CHARS)]
    """Id of the request, as its client chose it."""
    wire_id: Name
    """Id of the request on the bus."""
    service: Name = ""
    """Client name of the service; its receiver sets it by the subject."""
    model: Name = ""
    """Model of the request; empty: not known yet."""
    stage: Name = ""
    """What it waits for: `preparing` (it is read, or no worker has started), `turn` (behind other requests of the
    service), or `queue` (for a worker that accepts it). Empty: it was aborted."""
    seconds: Seconds = 0.0
    """Seconds since it arrived."""


class ServiceMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an HTTP service tells the other services of its fleet: that it lives, a question, or an answer."""

    v: Literal[1] = 1
    """Wire version."""
    id: Name = ""
    """Id of the question; empty: neither question nor answer."""
    asks: Literal["list", "abort"] | None = None
    """What the other services shall do with these requests. None: this is no question."""
    model: Name | None = None
    """In a question: model of the requests; None: all."""
    request_ids: Annotated[tuple[str, ...], Meta(max_length=2 * limits.MAX_CHUNKS_PER_FRAME)] | None = None
    """In a question: ids of the requests; None: all."""
    waiting: Annotated[tuple[WaitingRequest, ...], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)] = ()
    """In an answer: the requests that wait at the service, or that it has aborted."""
    left_out: Count = 0
    """In an answer: further such requests."""
    ends: bool = False
    """True: the service ends, and answers no more. Earlier releases take it for a sign of life."""


class LostAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that the client has lost, as it tells the worker of the next attempt."""

    attempt: Count = 0
    """Its `RequestMessage.attempt`."""
    worker: Name = ""
    """Worker that had it; empty: no worker had accepted it."""
    at: Annotated[float, Meta(ge=0, le=limits.MAX_UNIX_S)] = 0.0
    """Unix time of the loss in seconds, by the client's clock."""
    tokens: Count = 0
    """Tokens of this and all earlier attempts that the client keeps."""
    reason: Name = ""
    """Error code of the loss."""


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The history of one attempt of one sample of a request at one worker."""

    request_id: Annotated[str, Meta(max_length=limits.MAX_REQUEST_ID_CHARS)]
    """Id of the request on the wire."""
    given_id: Annotated[str, Meta(max_length=limits.MAX_GIVEN_ID_CHARS)] = ""
    """Id that the caller gave the request; empty: the same."""
    client: Name
    """Name of the client."""
    attempt: Count = 0
    """Number of the attempt, from 0. Each later attempt continues where the previous attempt was lost."""
    child: Count = 0
    """Number of the sample, 0 to n - 1."""
    lane: Name | None = None
    """Lane of the queue; None: the request was placed."""
    lora: Name | None = None
    """Name of the adapter; None: no adapter, or the worker runs an earlier release."""
    prompt_tokens: Count = 0
    """Prompt tokens; in resumed attempts with the tokens generated before."""
    traceparent: Name | None = None
    """W3C trace context of the request."""
    events: Annotated[tuple[TimelineEvent, ...], Meta(max_length=limits.MAX_TIMELINE_EVENTS)] = ()
    """Events in order. If there are too many, the events in the middle are left out."""
    phase: Literal["prefill", "decode"] | None = None
    """Phase of the attempt; None: this worker serves all of it."""
    lost: Annotated[tuple[LostAttempt, ...], Meta(max_length=limits.MAX_ATTEMPTS)] = ()
    """Attempts that the client has lost before this one, oldest first."""
    progress: RequestProgress | None = None
    """Progress of a request in flight; None: it has ended, or the worker runs an earlier release."""
