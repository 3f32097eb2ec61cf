"""Hypothesis strategies for all messages of the wire format, and a comparison of requests with arrays."""

import string
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rollbus.schemas import limits
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
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import Frame, KvTransfer, LinkMessage, RequestKey, RequestMessage, Sibling, encode
from rollbus.schemas.presence import (
    Capabilities,
    ClientPresence,
    ClientState,
    EngineStats,
    LoraInfo,
    RoutedExpertsInfo,
    WorkerCounters,
    WorkerPresence,
    WorkerState,
)
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import DTYPES, RowDtype
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.weights import OpenTransfer, PublishedVersion, Staging
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


handovers = st.builds(
    KvTransfer,
    params=st.binary(max_size=8),
    connector=maybe(names),
    weight_version=maybe(VERSION),
    lora_version=maybe(VERSION),
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


chunk_errors = st.builds(ChunkError, st.sampled_from(ErrorCode), texts, texts, texts, texts)


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


keys = st.builds(RequestKey, request_ids, INDEX, INDEX)
FRAME_NUMBER = st.integers(0, 2**53)
frames = st.builds(
    Frame,
    st.just(1),
    names,
    FRAME_NUMBER,
    st.lists(keys, max_size=3),
    st.lists(chunks(), max_size=3),
    FRAME_NUMBER,
    st.just("") | names,
)
link_messages = st.builds(
    LinkMessage,
    st.just(1),
    st.lists(keys, max_size=3),
    st.just("") | names,
    st.just("") | names,
    FRAME_NUMBER,
    FRAME_NUMBER,
    st.integers(0, 2**62),
    st.booleans(),
)

capabilities = st.builds(
    Capabilities,
    engine=names,
    engine_version=names,
    max_model_len=st.integers(1, 2**31),
    vocab_size=st.integers(1, 2**31),
    max_num_seqs=st.integers(1, 2**31),
    max_logprobs=st.integers(0, limits.MAX_LOGPROBS),
    dtype=names,
    routed_experts=maybe(
        st.builds(
            RoutedExpertsInfo,
            num_layers=st.integers(1, limits.MAX_LAYERS),
            top_k=st.integers(1, limits.MAX_TOP_K_EXPERTS),
            num_experts=st.integers(1, limits.MAX_EXPERTS),
            dtype=st.sampled_from(["u1", "<u2"]),
        )
    ),
    priority=st.booleans(),
    extra=st.lists(names, max_size=3).map(tuple),
    signature=texts,
    weight_updates=st.booleans(),
    weight_transfer=st.booleans(),
    max_loras=st.integers(0, 2**31),
    sleep=st.booleans(),
    data_parallel_size=st.integers(1, 2**31),
    max_lora_rank=st.none() | st.integers(1, 2**31),
    world_size=maybe(st.integers(1, 2**31)),
    version_labels=st.booleans(),
    role=st.sampled_from(["both", "prefill", "decode"]),
    kv_connector=maybe(names),
    sampling_mask=st.booleans(),
    weight_deltas=st.booleans(),
    request_groups=st.booleans(),
    group_backlog=st.booleans(),
    transfer_leases=st.booleans(),
    base_adapters=st.booleans(),
    request_lists=st.booleans(),
)
transfers = st.builds(
    OpenTransfer,
    id=names,
    by=names,
    age_s=st.floats(0, 1e9),
    left_s=st.floats(0, 1e9),
    chunks=st.integers(0, 2**53),
)
stagings = st.builds(
    Staging,
    source=texts,
    stage=names,
    done_bytes=st.integers(0, 2**53),
    total_bytes=st.integers(0, 2**53),
)
published = st.builds(
    PublishedVersion,
    version=VERSION,
    **{name: st.integers(0, 2**53) for name in PublishedVersion.__struct_fields__ if name != "version"},
)
counters = st.builds(
    WorkerCounters,
    **{
        name: st.floats(0, 1e9) if name.endswith("_s") else st.integers(0, 2**53)
        for name in WorkerCounters.__struct_fields__
    },
)
engine_stats = st.builds(
    EngineStats,
    kv_cache_use=maybe(st.floats(0, 1)),
    kv_cache_tokens=maybe(st.integers(1, 2**53)),
    **{
        name: maybe(st.floats(0, 1e9) if name.endswith("_per_s") else st.integers(0, 2**53))
        for name in EngineStats.__struct_fields__
        if not name.startswith("kv_cache_")
    },
)
presences = st.builds(
    WorkerPresence,
    worker=subject_tokens,
    incarnation=names,
    model=names,
    state=st.sampled_from(WorkerState),
    weight_version=VERSION,
    in_flight=st.integers(0, 2**31),
    free_slots=st.integers(0, 2**31),
    uptime_s=st.floats(0, 1e9),
    lease_s=st.floats(1e-3, 1e6),
    capabilities=maybe(capabilities),
    held_bytes=st.integers(0, 2**40),
    last_error=maybe(texts),
    pause_mode=maybe(st.sampled_from(["abort", "wait", "keep"])),
    queued=st.integers(0, 2**31),
    target_version=maybe(VERSION),
    epoch=st.integers(0, 2**53),
    loras=st.lists(st.builds(LoraInfo, name=names, version=VERSION), max_size=3).map(tuple),
    lease_age_s=st.floats(0, 1e6),
    counters=maybe(counters),
    engine_stats=maybe(engine_stats),
    staging=maybe(stagings),
    published=maybe(published),
    transfer=maybe(transfers),
    cache_epoch=st.integers(0, 2**53),
    oldest_prefix_s=maybe(st.floats(0, 1e9)),
)
client_presences = st.builds(
    ClientPresence,
    client=subject_tokens,
    incarnation=names,
    state=st.sampled_from(ClientState),
    lease_s=st.floats(1e-3, 1e6),
)


def plain(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields of a request in a form that == can compare."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    token_ids: npt.NDArray[np.int32] = fields["prompt_token_ids"]
    return {**fields, "prompt_token_ids": token_ids.tolist()}
