"""What workers answer when they are asked to look inside: the load of experts, and what became of single requests.

Nothing of it is published unasked. An admin or a frontend asks with `read_experts` or `read_request`, and each worker
answers with one `Ack`. Reads change nothing, are not recorded, and wait for nothing.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from . import limits

__all__ = [
    "COUNT_DTYPE",
    "ExpertCounts",
    "ExpertLoad",
    "RequestTimeline",
    "TimelineEvent",
    "TimelineEventName",
    "TokenTally",
]

COUNT_DTYPE: Final = "<u8"
"""Of each expert's count."""
Count = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
Version = Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
Seconds = Annotated[float, Meta(ge=0)]


class TokenTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of what an engine computed its counts have seen."""

    computed: Count = 0
    """Positions that the engine computed, each as often as it did so."""
    seen: Count = 0
    """Of these, the positions whose routing the worker got: not those below `start`, nor of requests that declined."""


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often one worker's router chose each expert under one version of the weights."""

    weight_version: Version
    """Of the weights that chose."""
    prompt: Annotated[bytes, Meta(max_length=limits.MAX_EXPERT_COUNTS_BYTES)] = b""
    """Choices at prompt positions that the engine computed: zlib of <u8[num_layers, num_experts]. Empty: none."""
    generated: Annotated[bytes, Meta(max_length=limits.MAX_EXPERT_COUNTS_BYTES)] = b""
    """Choices at generated tokens, in the same form."""
    prompt_tokens: TokenTally = TokenTally()
    """Of prompt positions."""
    generated_tokens: TokenTally = TokenTally()
    """Of generated tokens."""


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to `read_experts`.

    A worker counts in intervals of 5 s, whose numbers are Unix time / 5 s by its clock as it was at the start of the
    incarnation, and keeps the last 24 that have ended.
    """

    number: Count
    """Of the last interval that has ended."""
    first: Count
    """Of the first interval in `counts`: later than was asked for where the worker has forgotten some, or had not
    started; 1 above `number` where no interval that is asked for has ended."""
    seconds: Seconds
    """How long the intervals in `counts` are together; of `window` `versions`, since its first token."""
    num_layers: Annotated[int, Meta(ge=1, le=limits.MAX_LAYERS)]
    """Layers of the model that route."""
    num_experts: Annotated[int, Meta(ge=1, le=limits.MAX_EXPERTS)]
    """In each layer."""
    top_k: Annotated[int, Meta(ge=1, le=limits.MAX_TOP_K_EXPERTS)]
    """Experts that each position chooses in each layer."""
    counts: Annotated[tuple[ExpertCounts, ...], Meta(max_length=limits.MAX_EXPERT_VERSIONS)] = ()
    """One for each version of the weights, the newest first; none without tokens."""


TimelineEventName = Literal[
    "published", "offered", "started", "prefilled", "first_token", "held", "resumed", "weights", "restarted", "ended"
]
"""`published`: in the queue, by the server's clock. `offered`: the worker has admitted it. `started`: the engine has
it. `prefilled`: its prompt is computed. `held` and `resumed`: a pause. `weights`: tokens of another version begin.
`restarted`: its prompt is computed anew."""


class TimelineEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a request at a worker."""

    at: Annotated[float, Meta(ge=0, le=limits.MAX_UNIX_S)]
    """Unix time in seconds, by the worker's clock."""
    event: Name
    """A `TimelineEventName`; readers pass over those that newer workers have appended."""
    weight_version: Version | None = None
    """Of the weights from here on, with `offered` and `weights`."""
    tokens: Count | None = None
    """Generated so far, with `held`, `weights`, `restarted` and `ended`; with `prefilled`, prompt tokens."""
    cached_tokens: Count | None = None
    """With `prefilled`: prompt tokens that the engine had in its cache."""
    reason: Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)] | None = None
    """With `ended`: the finish reason, the error's code, or `returned`: the worker gave it back to the queue. With
    `held`, what the pause was for: `pause`, `weights` or `lora`."""


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt of one sample of a request at one worker."""

    request_id: Annotated[str, Meta(max_length=limits.MAX_REQUEST_ID_CHARS)]
    """As its client named it."""
    client: Name
    """Who asked for it."""
    attempt: Count = 0
    """0 for the first; each that follows goes on where the one before was lost."""
    child: Count = 0
    """Which of n samples."""
    lane: Name | None = None
    """Of the queue; None: it was placed at this worker."""
    prompt_tokens: Count = 0
    """Tokens of its prompt, those of resumed attempts with what came before."""
    traceparent: Name | None = None
    """The trace that it belongs to; None: none was given."""
    events: Annotated[tuple[TimelineEvent, ...], Meta(max_length=limits.MAX_TIMELINE_EVENTS)] = ()
    """In order; of more events than fit, those in the middle are left out."""
