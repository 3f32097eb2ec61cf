"""Hypothesis strategies for all messages of the wire format, and a comparison of requests with arrays."""

import string
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from msgspec import inspect as wire_types

from rollbus.schemas import limits
from rollbus.schemas.acks import Ack
from rollbus.schemas.chunk import (
    Chunk,
    ChunkError,
    End,
    FinishReason,
    PromptLogprobs,
    RoutedExperts,
    SamplingMask,
    TopLogprobs,
)
from rollbus.schemas.control import AnyCommand, Command, DesiredState, ReadRequest, Sleep
from rollbus.schemas.messages import Frame, KvTransfer, LinkMessage, RequestKey, RequestMessage, Sibling, encode
from rollbus.schemas.presence import ClientPresence, WorkerPresence
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import DTYPES, RowDtype
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.telemetry import ServiceMessage
from rollbus.schemas.weights import WeightSource
from tests.support.scenarios import little_endian

WORD = string.ascii_letters + string.digits + "_-"
TOKEN_ID = st.integers(0, limits.MAX_TOKEN_ID)
VERSION = st.integers(0, limits.MAX_WEIGHT_VERSION)
INDEX = st.integers(0, 2**31 - 1)
POSITION = st.integers(0, limits.MAX_POSITION)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw None or a value of `strategy`."""
    return st.none() | strategy


subject_tokens = st.text(WORD, min_size=1, max_size=limits.MAX_SUBJECT_TOKEN_CHARS)
request_ids = st.text(WORD + ":", min_size=1, max_size=limits.MAX_REQUEST_ID_CHARS)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=limits.MAX_NAME_CHARS
)
texts = st.text(st.characters(codec="utf-8"), max_size=50)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


def token_lists(min_size: int, max_size: int = 8) -> st.SearchStrategy[list[int]]:
    """Draw lists of token ids."""
    return st.lists(TOKEN_ID, min_size=min_size, max_size=max_size)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Draw any valid `SamplingParams`."""
    max_tokens = draw(maybe(st.integers(1, limits.MAX_TOKENS)))
    n = draw(st.integers(1, limits.MAX_N))
    bad_words = draw(maybe(st.lists(token_lists(1, 3), max_size=3)))
    stop_token_ids = draw(token_lists(0))
    forbidden = {*stop_token_ids, *(word[0] for word in bad_words or ())}
    allowed = maybe(token_lists(1).filter(lambda ids: not forbidden.issuperset(ids)))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, limits.MAX_TOKENS if max_tokens is None else max_tokens)),
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, limits.MAX_TOKEN_ID)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(maybe(st.integers(0, limits.MAX_SEED - n + 1))),
        stop_token_ids=stop_token_ids,
        ignore_eos=draw(st.booleans()),
        logprobs=draw(maybe(st.integers(0, limits.MAX_LOGPROBS))),
        prompt_logprobs=draw(maybe(st.integers(0, limits.MAX_LOGPROBS))),
        n=n,
        repetition_penalty=draw(st.floats(0, 100, exclude_min=True)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(maybe(st.dictionaries(TOKEN_ID, st.floats(-100, 100), max_size=3))),
        allowed_token_ids=draw(allowed),
        bad_words_token_ids=bad_words,
        extra=draw(maybe(st.dictionaries(names, json_values, max_size=3))),
    )


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    """Draw any valid `GenerateRequest`."""
    prompt = draw(token_lists(1))
    return GenerateRequest(
        prompt_token_ids=prompt,
        sampling=draw(sampling_params()),
        request_id=draw(request_ids),
        model=draw(maybe(names)),
        return_routed_experts=draw(maybe(st.booleans())),
        return_sampling_mask=draw(maybe(st.booleans())),
        routed_experts_prompt_start=draw(st.integers(0, len(prompt))),
        cache_salt=draw(maybe(names)),
        priority=draw(st.integers(-limits.MAX_PRIORITY, limits.MAX_PRIORITY)),
        session_id=draw(maybe(names)),
        lora=draw(maybe(names)),
        timeout_s=draw(maybe(st.floats(0, limits.MAX_TIMEOUT_S, exclude_min=True))),
        min_weight_version=draw(maybe(VERSION)),
        max_weight_lag=draw(maybe(VERSION)),
        traceparent=draw(maybe(st.just("00-" + "0a" * 16 + "-" + "1b" * 8 + "-01"))),
        group_id=draw(maybe(names)),
        tracestate=draw(maybe(st.just("vendor=1,t@v=a b"))),
    )


@st.composite
def request_messages(draw: st.DrawFn) -> RequestMessage:
    """Draw any valid `RequestMessage`, in plain mode or not, with siblings if they are allowed."""
    reply_to, kv, child = draw(maybe(names)), draw(maybe(handovers)), draw(INDEX)
    siblings = st.builds(
        Sibling, INDEX.filter(lambda sibling: sibling != child), maybe(st.integers(0, limits.MAX_SEED))
    )
    may_have_siblings = reply_to is None and (kv is None or kv.is_prefill)
    return RequestMessage(
        client=draw(subject_tokens),
        incarnation=draw(names) if reply_to is None else "",
        reply_to=reply_to,
        attempt=draw(INDEX),
        child=child,
        target_version=draw(maybe(VERSION)),
        kv=kv,
        request=msgspec.Raw(encode(draw(requests()))),
        siblings=tuple(draw(st.lists(siblings, max_size=3, unique_by=lambda sibling: sibling.child)))
        if may_have_siblings
        else (),
    )


@st.composite
def routed_experts(draw: st.DrawFn) -> RoutedExperts:
    """Draw any `RoutedExperts`, also with zero rows, made from an array as workers make them."""
    shape = draw(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 3)))
    dtype: RowDtype = draw(st.sampled_from(["u1", "<u2"]))
    size = shape[0] * shape[1] * shape[2] * DTYPES[dtype].itemsize
    rows = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), DTYPES[dtype]).reshape(shape)
    return RoutedExperts.from_rows(rows, draw(st.integers(0, limits.MAX_POSITION - shape[0])))


def floats(count: int) -> st.SearchStrategy[bytes]:
    """Draw <f4[count]: log probabilities, including -inf."""
    logprobs = st.floats(max_value=0, width=32) | st.just(-np.inf)
    return st.lists(logprobs, min_size=count, max_size=count).map(lambda v: little_endian(np.array(v), "<f4"))


def ids(count: int) -> st.SearchStrategy[bytes]:
    """Draw <i4[count]: token ids."""
    return token_lists(count, count).map(lambda v: little_endian(np.array(v), "<i4"))


@st.composite
def top_logprobs(draw: st.DrawFn, positions: int) -> TopLogprobs:
    """Draw `TopLogprobs` of this many positions."""
    width = draw(st.integers(1, 3))
    return TopLogprobs(width, draw(ids(positions * width)), draw(floats(positions * width)))


@st.composite
def sampling_masks(draw: st.DrawFn, count: int) -> SamplingMask:
    """Draw a `SamplingMask` of this many tokens."""
    counts = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    return SamplingMask(little_endian(np.array(counts), "<i4"), draw(ids(sum(counts))))


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    """Draw any `PromptLogprobs`."""
    count = draw(st.integers(0, 4))
    top = draw(maybe(top_logprobs(count)))
    return PromptLogprobs(draw(st.integers(1, limits.MAX_POSITION)), draw(floats(count)), top)


@st.composite
def ends(draw: st.DrawFn) -> End:
    """Draw any `End`."""
    reason = draw(st.sampled_from(FinishReason))
    return End(
        reason,
        draw(POSITION),
        draw(POSITION),
        draw(maybe(TOKEN_ID)),
        draw(chunk_errors) if reason is FinishReason.ERROR else None,
        draw(maybe(POSITION)),
        draw(maybe(POSITION)),
        draw(maybe(st.binary(max_size=8))),
    )


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """Draw any `Chunk`."""
    count = draw(st.integers(0, 4))
    return Chunk(
        request_id=draw(request_ids),
        attempt=draw(INDEX),
        child=draw(INDEX),
        chunk_index=draw(INDEX),
        weight_version=draw(VERSION),
        token_ids_data=draw(ids(count)),
        logprobs_data=draw(maybe(floats(count))),
        routed_experts=draw(maybe(routed_experts())),
        top_logprobs=draw(maybe(top_logprobs(count))),
        prompt_logprobs=draw(maybe(prompt_logprobs())),
        end=draw(maybe(ends())),
        lora_version=draw(maybe(VERSION)),
        worker_id=draw(maybe(names)),
        traceparent=draw(maybe(names)),
        kv_recomputed=draw(maybe(st.booleans())),
        sampling_mask=draw(maybe(sampling_masks(count))),
    )


# All other messages: each field has any value of its type, within the bounds that the decoder checks.


def instances(kind: type[msgspec.Struct], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw any value of a struct. Fields that are not given have any value of their type."""
    if kind in SPECIAL and not given:
        return SPECIAL[kind]
    named = NAMED | (OF_COMMANDS if issubclass(kind, Command) else {})
    info = wire_types.type_info(kind)
    assert isinstance(info, wire_types.StructType)
    drawn = {}
    for field in info.fields:
        is_nullable = isinstance(field.type, wire_types.UnionType) and field.type.includes_none
        inner = named[field.name] if field.name in named else of_type(field.type)
        drawn[field.name] = maybe(inner) if is_nullable else inner
    return st.builds(kind, **drawn | given)


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Draw any value of a type, within its bounds."""
    match kind:
        case wire_types.UnionType():
            return st.one_of([of_type(each) for each in kind.types if not isinstance(each, wire_types.NoneType)])
        case wire_types.ListType() | wire_types.VarTupleType():
            items = st.lists(of_type(kind.item_type), min_size=kind.min_length or 0, max_size=2)
            return items if isinstance(kind, wire_types.ListType) else items.map(tuple)
        case wire_types.StrType(pattern=str(pattern)):
            return st.from_regex(pattern, fullmatch=True)
        case wire_types.FloatType():
            low = -1e6 if kind.ge is None and kind.gt is None else 0
            return st.floats(low, kind.le or 1e9, exclude_min=kind.gt is not None)
    return DRAWN[type(kind)](kind)


DRAWN: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    wire_types.LiteralType: lambda kind: st.sampled_from(kind.values),
    wire_types.EnumType: lambda kind: st.sampled_from(kind.cls),
    wire_types.StructType: lambda kind: st.deferred(lambda: instances(kind.cls)),
    wire_types.TupleType: lambda kind: st.tuples(*map(of_type, kind.item_types)),
    wire_types.DictType: lambda kind: st.dictionaries(names, of_type(kind.value_type), max_size=2),
    wire_types.IntType: lambda kind: st.integers(kind.ge or 0, 2**53 if kind.le is None else kind.le),
    wire_types.StrType: lambda kind: st.text(st.characters(codec="utf-8"), min_size=kind.min_length or 0, max_size=20),
    wire_types.BytesType: lambda kind: st.binary(max_size=8),
    wire_types.BoolType: lambda kind: st.booleans(),
    wire_types.AnyType: lambda kind: json_values,
}
"""Strategies of the other types."""
EPOCH = st.integers(0, 2**53)
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "worker": subject_tokens,
    "client": subject_tokens,
    "id": request_ids,
    "model": names,
    "name": names,
    "epoch": EPOCH,
}
"""Fields whose values have another check besides that of their type."""
OF_COMMANDS: dict[str, st.SearchStrategy[Any]] = {
    "workers": st.lists(subject_tokens, min_size=1, max_size=3).map(tuple),
    "timeout_s": st.floats(0, limits.MAX_TIMEOUT_S, exclude_min=True),
    "by": st.just("http:admin"),
    "request_id": request_ids,
}
SPECIAL: dict[type[msgspec.Struct], st.SearchStrategy[Any]] = {
    Chunk: chunks(),
    WeightSource: st.builds(WeightSource, path=names) | st.builds(WeightSource, objects=names),
}
"""Structs whose fields depend on each other."""
SPECIAL[ReadRequest] = instances(ReadRequest, request_id=request_ids) | instances(ReadRequest, show=st.just("failed"))
SPECIAL[Sleep] = instances(Sleep, for_s=st.none()) | instances(
    Sleep, level=st.just(2), for_s=OF_COMMANDS["timeout_s"], workers=OF_COMMANDS["workers"]
)
chunk_errors = instances(ChunkError)
keys = instances(RequestKey)
handovers = instances(KvTransfer)
frames = instances(Frame)
link_messages = instances(LinkMessage)
presences = instances(WorkerPresence)
client_presences = instances(ClientPresence)
service_messages = instances(ServiceMessage)
commands = st.one_of([instances(kind) for kind in get_args(AnyCommand)])
acks = instances(Ack)
desired_states = instances(DesiredState)


def plain(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request in a form that == can compare."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    token_ids: npt.NDArray[np.int32] = fields["prompt_token_ids"]
    return {**fields, "prompt_token_ids": token_ids.tolist()}
