"""A request to generate tokens: its ids, its fields, and the request for the rest of an answer.

A rest is the next attempt after a loss, or the continuation of a stopped answer. Routed experts have a row for each
position except the last token's. The request for the rest therefore asks for rows from that position on. The engine
computes this boundary row with the rest and its weight version. No row is computed twice.

Callers may write other ids than the wire carries: every message has a short form.
"""

import base64
import hashlib
import os
from collections.abc import Mapping
from copy import copy
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr, replace

from . import limits
from .checks import (
    REQUEST_ID_PATTERN,
    FieldChecks,
    check_bool,
    check_float,
    check_int,
    check_name,
    check_request_id,
    check_token_ids,
    check_traceparent,
    check_tracestate,
    describe,
)
from .chunk import FinishReason
from .decoding import MALFORMED
from .errors import InvalidRequest
from .limits import MAX_GIVEN_ID_CHARS, MAX_SEED
from .rows import Int32s, Rows, expected_rows
from .sampling import NamedFields, SamplingParams, check_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
else:
    TokenIds = np.ndarray

Inexact = Literal["refuse", "continue"]
"""How to continue an answer whose sampler had state. `refuse` raises `InvalidRequest`. `continue` uses another seed,
and the joined result is not `exact`."""
OPEN_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""Finish reasons after which an answer may be continued."""
MAPPED = "x:"
"""Prefix of the wire's form of ids that subjects and chunks cannot carry as they are."""
NUM_HASH_CHARS = 26
"""130 bits: no two ids of a fleet have the same wire form."""
Lane = Literal["resume", "high", "normal", "low"]
"""Lanes of the queue. `resume` is for later attempts and decode phases only."""


def make_id() -> str:
    """Return a new random id: 128 bits in hexadecimal."""
    return os.urandom(16).hex()


class StoppedAnswer(Protocol):
    """The part of `rollbus.Generation` that a continuation needs."""

    @property
    def child(self) -> int:
        """Number of the sample, 0 to n - 1."""

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens, Lp."""

    @property
    def start(self) -> int:
        """Absolute position of the first row."""

    @property
    def token_ids(self) -> Int32s:
        """Generated tokens, i4[G]."""

    @property
    def model(self) -> str | None:
        """Model that generated it; None if it is unknown."""

    @property
    def routed_experts(self) -> Rows | None:
        """Rows from `start` on; None without routed experts."""

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the answer ended."""


class GenerateRequest(msgspec.Struct, metaclass=NamedFields, frozen=True, kw_only=True, omit_defaults=True, eq=False):
    """One prompt to continue.

    The constructor checks all fields: an invalid value raises `InvalidRequest` with the field's name.

    Requests compare by identity, because numpy arrays have no single truth value of equality.
    """

    prompt_token_ids: TokenIds
    """Token ids of the prompt; stored as a read-only i4[Lp] array."""
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters."""
    request_id: str = msgspec.field(default_factory=make_id)
    """Id of the request, unique among the open requests of one client. Up to 512 printable characters; `wire_id` on the
    wire."""
    model: str | None = None
    """Served model name; None: the only known model at the client's first request without a name."""
    return_routed_experts: bool | None = None
    """True: reject the request if the model has no routed experts. None: return them if it has. False: never."""
    routed_experts_prompt_start: int = 0
    """Number of leading prompt positions without routed experts in the result."""
    cache_salt: str | None = None
    """Salt of the prefix cache: only requests with the same salt share cache entries."""
    priority: int = 0
    """Priority; lower is more urgent, as in vLLM. It selects the lane, and the order in the engine if that supports
    it."""
    session_id: str | None = None
    """Session, for example a conversation, whose turns a client may place at one worker."""
    lora: str | None = None
    """Name of a loaded LoRA adapter; None: the base model."""
    timeout_s: float | None = None
    """Seconds from now until the request fails with `timeout`; None: `DEFAULT_TIMEOUT_S`."""
    min_weight_version: int | None = None
    """Workers with older weights do not serve the request."""
    max_weight_lag: int | None = None
    """Number of versions by which the weights may advance before the request starts, else `too_stale`."""
    traceparent: str | None = None
    """W3C trace context, for worker and engine of every attempt."""
    return_sampling_mask: bool | None = None
    """True: reject the request if the engine makes no sampling masks. None: return them if it does. False: never."""
    group_id: str | None = None
    """Group of requests that share a prompt, which a client may place at one worker."""
    tracestate: str | None = None
    """Vendor data for `traceparent`, without which it is not sent."""
    id_scope: str | None = None
    """Scope of `request_id`, for example a user of a service: equal ids of two scopes are different requests. Only its
    hash is sent, as part of the wire's id."""

    def __post_init__(self) -> None:
        """Check every field and convert it to its canonical type."""
        _CHECKS.apply(self)
        start = self.routed_experts_prompt_start
        if type(start) is not int or start:
            start = check_int("routed_experts_prompt_start", start, 0, len(self.prompt_token_ids))
            force_setattr(self, "routed_experts_prompt_start", start)

    @property
    def wire_id(self) -> str:
        """Id of the request on the wire, see `rollbus.schemas.request.wire_id`."""
        return wire_id(self.request_id, self.id_scope)

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens, Lp."""
        return len(self.prompt_token_ids)

    def on_wire(self) -> "GenerateRequest":
        """Return the request as messages carry it: its id is the `wire_id`, and it has no `id_scope`."""
        name = self.wire_id
        if name == self.request_id:
            return self
        sent = copy(self)
        force_setattr(sent, "request_id", name)
        force_setattr(sent, "id_scope", None)
        return sent

    def in_trace(self, traceparent: str, tracestate: str | None) -> "GenerateRequest":
        """Return this request as part of a trace. The values must be valid; this method does not check them."""
        traced = copy(self)
        force_setattr(traced, "traceparent", traceparent)
        force_setattr(traced, "tracestate", tracestate)
        return traced

    def continuing(self, generation: StoppedAnswer, *, inexact: Inexact = "refuse") -> "GenerateRequest":
        """Return a new request for the rest of `generation`, which belongs to this request and did not end normally.

        The prompt of the new request is this prompt plus the tokens of `generation`. `routed_experts_prompt_start` is
        the first missing row. `max_tokens` and `min_tokens` are reduced by the number of generated tokens. The new
        request asks for no prompt logprobs. It is for one sample, names the model of `generation`, and has its own id.
        Its `timeout_s` starts again.
        `Generation.joined` joins both parts. A generation without tokens gives a request for the same prompt.

        Args:
            inexact: handling of a sampler state that is lost: a seed, penalties, bad words, or engine parameters such
                as a grammar. `refuse`: raise. `continue`: continue with another seed; penalties and the rest treat the
                tokens so far as a prompt, and the joined generation is not `exact`.

        Raises:
            InvalidRequest: `generation` belongs to another request, ended normally, or the sampler's state is lost.
        """
        return rest_of_answer(self, generation, inexact=inexact, request_id=make_id())


def as_request(prompt: "GenerateRequest | TokenIds | None", fields: Mapping[str, Any]) -> GenerateRequest:
    """Return `prompt` if it is a request. If it is token ids, return the request with these fields.

    Args:
        prompt: None: `fields` have the prompt.
        fields: fields of `GenerateRequest` and of `SamplingParams`, for token ids.

    Raises:
        InvalidRequest: a field is wrong or unknown, or is given beside a request or beside `sampling`.
    """
    if isinstance(prompt, GenerateRequest):
        for name in fields:
            raise InvalidRequest(name, "is given beside a request", "fields of the request")
        return prompt
    if isinstance(prompt, str | bytes):
        raise InvalidRequest(
            "prompt_token_ids", "is text", "token ids, such as tokenizer.encode(text); the HTTP service takes text"
        )
    check_names("", fields, (*SamplingParams.__struct_fields__, *GenerateRequest.__struct_fields__))
    params = {name: fields[name] for name in fields if name in SamplingParams.__struct_fields__}
    others = {name: fields[name] for name in fields if name not in params}
    if prompt is not None:
        others["prompt_token_ids"] = prompt
    if params and "sampling" in others:
        raise InvalidRequest(next(iter(params)), "is given beside sampling", "one of them")
    if params:
        others["sampling"] = SamplingParams(**params)
    return GenerateRequest(**others)


def lane_of(priority: int) -> Lane:
    """Return the queue lane of a priority: below 0 is `high`, 0 is `normal`, above 0 is `low`."""
    if priority < 0:
        return "high"
    return "normal" if priority == 0 else "low"


def expand_children(request: GenerateRequest) -> list[GenerateRequest]:
    """Split a request for n samples into n requests for one sample each; child i uses seed + i.

    Prompt logprobs and the prompt's routed experts are equal for all child requests. Each child request carries its own
    copy.
    """
    if request.sampling.n == 1:
        return [request]
    seed = request.sampling.seed
    return [
        replace(request, sampling=replace(request.sampling, n=1, seed=None if seed is None else seed + child))
        for child in range(request.sampling.n)
    ]


def rest_of(request: "GenerateRequest", token_ids: Int32s, num_rows: int) -> "GenerateRequest":
    """Return `request` for the tokens after `token_ids`, with the same id. `token_ids` must not be empty.

    Args:
        request: a request for one sample.
        num_rows: number of rows of routed experts that already exist; 0 also if the request wants none.
    """
    sampling, num_tokens = request.sampling, len(token_ids)
    return replace(
        request,
        prompt_token_ids=np.concatenate([np.asarray(request.prompt_token_ids), token_ids]),
        routed_experts_prompt_start=request.routed_experts_prompt_start + num_rows,
        sampling=replace(
            sampling,
            max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - num_tokens,
            min_tokens=max(sampling.min_tokens - num_tokens, 0),
            prompt_logprobs=None,
            # The state of the seeded generator is lost. The same seed would repeat the noise of the first tokens.
            seed=None if sampling.seed is None else _derive_seed(sampling.seed, num_tokens),
        ),
    )


def rest_of_answer(
    request: "GenerateRequest", answer: StoppedAnswer, *, inexact: Inexact, request_id: str
) -> "GenerateRequest":
    """Return the request for the rest of `answer`, with this id; see `GenerateRequest.continuing`."""
    sampling, num_tokens = request.sampling, len(answer.token_ids)
    start = request.routed_experts_prompt_start
    if (answer.prompt_len, answer.start) != (request.prompt_len, start):
        raise InvalidRequest(
            "generation",
            f"has a prompt of {answer.prompt_len} tokens and rows from {answer.start} on",
            f"a generation of this request: {request.prompt_len} tokens, rows from {start} on",
        )
    if answer.child >= sampling.n:
        raise InvalidRequest("generation", f"is of sample {answer.child}", f"samples 0 to {sampling.n - 1}")
    reason = answer.finish_reason if answer.finish_reason not in OPEN_ENDS else why_ended(sampling, answer.token_ids)
    if reason is not None:
        raise InvalidRequest("generation", f"ended normally ({reason})", "a generation that was aborted or failed")
    if num_tokens and inexact == "refuse":
        check_continuable(sampling)
    seed = None if sampling.seed is None else sampling.seed + answer.child
    model = request.model or answer.model
    request = replace(request, sampling=replace(sampling, n=1, seed=seed), request_id=request_id, model=model)
    if not num_tokens:
        return request
    return rest_of(request, answer.token_ids, num_kept_rows(answer))


def num_kept_rows(answer: StoppedAnswer) -> int:
    """Return the number of rows of a stopped answer that belong to its tokens.

    Rows may arrive before their tokens; the number excludes these rows.
    """
    if answer.routed_experts is None:
        return 0
    expected = expected_rows(answer.prompt_len, answer.start, len(answer.token_ids))
    return min(len(answer.routed_experts), expected)


def check_continuable(sampling: SamplingParams) -> None:
    """Check that the sampling has no state that is lost when an answer stops.

    Raises:
        InvalidRequest: the sampling has a seed, penalties, bad words, or engine parameters such as a grammar.
    """
    if fields := sampling.stateful_fields:
        raise InvalidRequest(
            f"sampling.{fields[0]}",
            "gives the sampler a state that is lost when an answer stops: an exact continuation is impossible",
            "no seed (except with temperature 0), penalties, bad words or extra; or inexact='continue'",
        )


def why_ended(sampling: SamplingParams, token_ids: Int32s) -> FinishReason | None:
    """Return why an answer ended after `token_ids`, if its terminal chunk was lost. None: more tokens may follow."""
    num_tokens = len(token_ids)
    if num_tokens > sampling.min_tokens and int(token_ids[-1]) in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens == sampling.max_tokens else None


def _derive_seed(seed: int, num_tokens: int) -> int:
    """Return another seed for the tokens after the first `num_tokens`.

    The same arguments always give the same seed. Seeds of different arguments are unrelated.
    """
    digest = blake2b(f"{seed} {num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def check_given_id(field: str, value: object) -> str:
    """Accept printable ids of up to 512 characters without a space at either end."""
    if type(value) is str and REQUEST_ID_PATTERN.fullmatch(value) is not None:
        # The usual id, as on the wire.
        return value
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= MAX_GIVEN_ID_CHARS
        or not value.isprintable()
        or value != value.strip()
    ):
        raise InvalidRequest(
            field,
            f"is {describe(value)}" + (f" of {len(value)} characters" if isinstance(value, str) else ""),
            f"1 to {MAX_GIVEN_ID_CHARS} printable characters without a space at either end",
        )
    return str.__str__(value)


def wire_id(given: str, scope: str | None = None) -> str:
    """Return the id on the wire of a request with the id `given`.

    An id of up to 128 of A-Z a-z 0-9 _ : - stays as it is. Any other id, an id that begins with `x:`, and an id with a
    scope become `x:` and a hash.
    """
    if scope is None and not given.startswith(MAPPED) and REQUEST_ID_PATTERN.fullmatch(given) is not None:
        return given
    text = given if scope is None else f"{scope}\0{given}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return MAPPED + base64.b32encode(digest)[:NUM_HASH_CHARS].decode()


def _check_params(field: str, value: object) -> SamplingParams:
    if not isinstance(value, SamplingParams):
        raise InvalidRequest(field, f"is {describe(value)}", "SamplingParams, or a map of them")
    return value


_CHECKS: Final = FieldChecks(
    GenerateRequest,
    "",
    {
        "prompt_token_ids": partial(check_token_ids, min_length=1, max_length=limits.MAX_PROMPT_TOKENS),
        "sampling": _check_params,
        "request_id": check_given_id,
        # Its limit is the length of the prompt.
        "routed_experts_prompt_start": lambda _, value: value,
        "priority": partial(check_int, low=-limits.MAX_PRIORITY, high=limits.MAX_PRIORITY),
        **dict.fromkeys(("return_routed_experts", "return_sampling_mask"), check_bool),
        **dict.fromkeys(("model", "session_id", "lora", "group_id", "id_scope"), check_name),
        "cache_salt": partial(check_name, max_chars=limits.MAX_CACHE_SALT_CHARS),
        "timeout_s": partial(check_float, low=0, high=limits.MAX_TIMEOUT_S, above=True),
        "min_weight_version": partial(check_int, low=0, high=limits.MAX_WEIGHT_VERSION),
        "max_weight_lag": partial(check_int, low=0, high=limits.MAX_WEIGHT_VERSION),
        "traceparent": check_traceparent,
        "tracestate": check_tracestate,
    },
)


class _OnlyId(msgspec.Struct):
    request_id: str


_only_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


def request_id_of(raw: bytes | msgspec.Raw) -> str | None:
    """Return the wire's id of an encoded `GenerateRequest`, even if other fields are wrong; None if it is invalid."""
    try:
        return check_request_id("request_id", _only_id_decoder.decode(raw).request_id)
    except (*MALFORMED, InvalidRequest):
        return None
