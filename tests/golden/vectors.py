"""The golden messages by name.

Messages are appended and never edited, because other programs were written against their bytes.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from rollbus.schemas import messages
from rollbus.schemas.acks import Ack
from rollbus.schemas.chunk import Chunk, ChunkError, End, FinishReason, PromptLogprobs, RoutedExperts, TopLogprobs
from rollbus.schemas.control import Command, DesiredState
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import Frame, KvTransfer, LinkMessage, RequestKey, RequestMessage, encode
from rollbus.schemas.presence import ClientPresence, ClientState, RoutedExpertsInfo, WorkerPresence, WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.telemetry import ServiceMessage
from tests.golden.control_vectors import CONTROL_VECTORS
from tests.golden.fleet_vectors import (
    MASK_VECTORS,
    PLACEMENT_VECTORS,
    PRESENCE_VECTORS,
    capabilities,
    chunk,
    presence,
    request,
)
from tests.support.scenarios import little_endian

Message = (
    RequestMessage
    | Frame
    | LinkMessage
    | WorkerPresence
    | ClientPresence
    | Command
    | Ack
    | DesiredState
    | ServiceMessage
)
DECODERS: dict[str, Callable[[bytes], msgspec.Struct]] = {
    "ack": messages.decode_ack,
    "client": messages.decode_client_presence,
    "control": messages.decode_command,
    "direct": messages.decode_request_message,
    "frame": messages.decode_frame,
    "link": messages.decode_link_message,
    "presence": messages.decode_presence,
    "req": messages.decode_request_message,
    "service": messages.decode_service_message,
}
"""Decoders of messages by the kind in their subject."""


def i4(*values: int) -> bytes:
    """Return token ids in the wire format."""
    return little_endian(np.array(values), "<i4")


def f4(*values: float) -> bytes:
    """Return log probabilities in the wire format."""
    return little_endian(np.array(values), "<f4")


FULL_REQUEST = GenerateRequest(
    prompt_token_ids=[1, 2, 300, 151_643],
    sampling=SamplingParams(
        max_tokens=64,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        seed=1234,
        stop_token_ids=[7, 8],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=0,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={5: -100.0},
        allowed_token_ids=[5, 6, 7, 8],
        bad_words_token_ids=[[9, 10], [11]],
        extra={"structured_outputs": {"regex": "a+"}},
    ),
    request_id="step-7:00042",
    model="org/model-1.5",
    return_routed_experts=True,
    routed_experts_prompt_start=3,
    cache_salt="salt",
    priority=-5,
    session_id="session 1",
    lora="adapter",
    timeout_s=30.0,
    min_weight_version=6,
    max_weight_lag=2,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)


def frame(number: int, *chunks: Chunk, admitted: tuple[RequestKey, ...] = ()) -> Frame:
    """Return a frame of the first link to a client."""
    return Frame(1, "incarnation", number, list(admitted), list(chunks), 0, "life-1")


STREAM = [
    # The result of a prefill step: the rows of the prompt and the first token.
    chunk(
        "a",
        token_ids_data=i4(300),
        logprobs_data=f4(-0.5),
        routed_experts=RoutedExperts.from_rows(np.arange(12, dtype="u1").reshape(3, 2, 2), 0),
    ),
    # The result of a decode step: one row, which belongs to the previous token.
    chunk(
        "a",
        chunk_index=1,
        token_ids_data=i4(151_643),
        logprobs_data=f4(-np.inf),
        routed_experts=RoutedExperts.from_rows(np.array([[[255, 0], [1, 2]]], "u1"), 3),
        end=End(FinishReason.STOP, 2, 4, stop_reason=151_643, cached_tokens=0, routed_experts_start=0),
    ),
]
FAILURE = ChunkError(
    ErrorCode.INVALID_REQUEST,
    "sampling.top_p is 0.0; allowed: a number above 0 up to 1",
    "sampling.top_p",
    "is 0.0",
    "a number above 0 up to 1",
)
LOGPROBS = chunk(
    "c",
    chunk_index=5,
    weight_version=0,
    token_ids_data=i4(1, 2),
    logprobs_data=f4(-0.25, -2.0),
    top_logprobs=TopLogprobs(2, i4(1, 5, 6, 2), f4(-0.25, -1.5, -0.5, -2.0)),
    prompt_logprobs=PromptLogprobs(1, f4(-3.0), TopLogprobs(1, i4(9), f4(-np.inf))),
)
WIDE_ROWS = chunk(
    "b",
    attempt=2,
    child=1,
    weight_version=2**31 - 1,
    routed_experts=RoutedExperts.from_rows(np.array([[[1, 256, 65_535]]], "<u2"), 70_000),
)
KV_PARAMS = b"\x81\xa2id\xa1x"

VECTORS: dict[str, Message] = {
    "request_minimal": request([1, 2, 3], "r"),
    "request_full": RequestMessage(
        client="trainer_0", incarnation="life-2", attempt=1, child=3, request=msgspec.Raw(encode(FULL_REQUEST))
    ),
    "request_plain": request(
        [1, 2, 3], "r", message={"client": "c", "incarnation": "", "reply_to": "rb.v1.default.plain.c.1"}
    ),
    "request_prompt_as_list": RequestMessage(
        client="c",
        incarnation="life-1",
        request=msgspec.Raw(msgspec.msgpack.encode({"prompt_token_ids": [1, 2, 3], "request_id": "r"})),
    ),
    "frame_plain": Frame(1, "incarnation", 0, [RequestKey("r")], []),
    "frame_heartbeat": Frame(1, "incarnation", 2**53, [], [], 1, "life-1"),
    "frame_admits": frame(1, admitted=(RequestKey("a"), RequestKey("b", 2, 1))),
    "frame_routing_u1": frame(2, *STREAM),
    "frame_routing_u2": Frame(1, "incarnation", 3, [], [WIDE_ROWS]),
    "frame_logprobs": Frame(1, "incarnation", 2**40, [], [LOGPROBS]),
    "frame_failures": Frame(
        1,
        "incarnation",
        4,
        [],
        [
            chunk("d", end=End(FinishReason.ERROR, 0, 0, error=FAILURE)),
            chunk("e", chunk_index=9, end=End(FinishReason.ABORT, 9, 0)),
        ],
    ),
    "link_abort": LinkMessage(1, [RequestKey("a"), RequestKey("b", 1, 0)]),
    "link_acks": LinkMessage(1, [], "life-1", "incarnation", 2, 41, 8 * 1024 * 1024),
    "link_resend": LinkMessage(1, [RequestKey("a")], "life-1", "incarnation", 0, 3, 2**40, resend=True),
    "presence_starting": presence(WorkerState.STARTING, weight_version=0, uptime_s=0.5),
    "presence_serving": presence(
        in_flight=3,
        free_slots=253,
        capabilities=capabilities(
            routed_experts=RoutedExpertsInfo(num_layers=48, top_k=8, num_experts=128, dtype="u1"),
            priority=True,
            extra=("structured_outputs",),
        ),
        held_bytes=70_000,
        model_path="/models/model-1.5",
    ),
    "presence_client": ClientPresence(client="trainer-0", incarnation="life-1", state=ClientState.LIVE, lease_s=5.0),
    "presence_client_closed": ClientPresence(
        client="trainer-0", incarnation="life-1", state=ClientState.CLOSED, lease_s=5.0
    ),
    "request_of_weights": request([1], "r", max_weight_lag=2, message={"target_version": 7}),
    "frame_lora": frame(5, chunk("f", token_ids_data=i4(11), lora_version=3)),
    "frame_trace": frame(6, chunk("g", attempt=1, token_ids_data=i4(12), traceparent=FULL_REQUEST.traceparent)),
    "frame_kv_recomputed": frame(
        7, chunk("h", chunk_index=3, weight_version=8, token_ids_data=i4(12, 13), kv_recomputed=True)
    ),
    "request_prefill_leg": request([1, 2], "h", sampling=SamplingParams(max_tokens=1), message={"kv": KvTransfer()}),
    "frame_prefill_leg": frame(
        7,
        chunk(
            "h",
            token_ids_data=i4(3),
            logprobs_data=f4(-0.5),
            routed_experts=RoutedExperts.from_rows(np.arange(8, dtype="u1").reshape(2, 2, 2), 0),
            end=End(FinishReason.LENGTH, 1, 2, routed_experts_start=0, kv_params=KV_PARAMS),
            lora_version=3,
        ),
    ),
    "request_decode_leg": request(
        [1, 2, 3],
        "h",
        routed_experts_prompt_start=2,
        message={
            "attempt": 1,
            "kv": KvTransfer(params=KV_PARAMS, connector="ExampleConnector", weight_version=7, lora_version=3),
        },
    ),
    "presence_prefill": presence(
        worker="p0",
        in_flight=1,
        free_slots=31,
        capabilities=capabilities(max_num_seqs=32, role="prefill", kv_connector="ExampleConnector"),
    ),
    "request_trace": request([1], "r", traceparent=FULL_REQUEST.traceparent, tracestate="a=1,t@v=b c"),
    **MASK_VECTORS,
    **CONTROL_VECTORS,
    **PRESENCE_VECTORS,
    **PLACEMENT_VECTORS,
}
