"""The golden messages of presence, placement and sampling masks. As in `vectors`, they are appended and never edited.

`presence`, `capabilities`, `request` and `chunk` have the values that most golden messages share.
"""

from typing import Any

import msgspec
import numpy as np

from rollbus.schemas.chunk import Chunk, SamplingMask
from rollbus.schemas.messages import Frame, KvTransfer, RequestMessage, Sibling, encode
from rollbus.schemas.presence import (
    Capabilities,
    EngineStats,
    LoraInfo,
    SamplingLimits,
    WorkerCounters,
    WorkerPresence,
    WorkerState,
)
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.telemetry import LostAttempt
from rollbus.schemas.weights import OpenTransfer, PublishedVersion, Staging
from tests.support.scenarios import little_endian


def presence(state: WorkerState = WorkerState.SERVING, **fields: Any) -> WorkerPresence:
    """Return the presence of a worker."""
    values: dict[str, Any] = {
        "worker": "w0", "incarnation": "i0", "model": "org/model-1.5", "state": state, "weight_version": 7,
        "in_flight": 0, "free_slots": 0, "uptime_s": 60.0, "lease_s": 10.0,
    }  # fmt: skip
    return WorkerPresence(**values | fields)


def capabilities(**fields: Any) -> Capabilities:
    """Return the capabilities of a worker with vLLM."""
    values: dict[str, Any] = {
        "engine": "vllm", "engine_version": "0.30.0", "max_model_len": 4096, "vocab_size": 151_936,
        "max_num_seqs": 256, "max_logprobs": 20, "dtype": "bfloat16",
    }  # fmt: skip
    return Capabilities(**values | fields)


def request(
    prompt: list[int], request_id: str, *, message: dict[str, Any] | None = None, **fields: Any
) -> RequestMessage:
    """Return the message of a request with these fields. `message` has those of the message itself."""
    asked = GenerateRequest(prompt_token_ids=prompt, request_id=request_id, **fields)
    values: dict[str, Any] = {"client": "trainer-0", "incarnation": "life-1", "request": msgspec.Raw(encode(asked))}
    return RequestMessage(**values | (message or {}))


def chunk(request_id: str, **fields: Any) -> Chunk:
    """Return the first chunk of a request."""
    values: dict[str, Any] = {"attempt": 0, "child": 0, "chunk_index": 0, "weight_version": 7}
    return Chunk(request_id=request_id, **values | fields)


PRESENCE_VECTORS: dict[str, WorkerPresence] = {
    "presence_counters": presence(
        WorkerState.FENCED,
        counters=WorkerCounters(requests=3, ended=2, given_up=1, generated_tokens=2**40, credit_stalls=5, fences=1),
    ),
    "presence_paused": presence(
        WorkerState.PAUSED,
        in_flight=3,
        last_error="update_weights: model.safetensors is missing",
        pause_mode="keep",
        queued=1,
        target_version=8,
        epoch=41,
        loras=(LoraInfo(name="style", version=3),),
        lease_age_s=0.25,
    ),
    "presence_holder": presence(WorkerState.UPDATING, host="node-3", pid=4711, held_s=58.5),
    "presence_load": presence(
        in_flight=6,
        engine_stats=EngineStats(
            kv_cache_use=0.75,
            running=4,
            waiting=2,
            preemptions=1,
            prefix_cache_queries=4096,
            prefix_cache_hits=1024,
            prefill_tokens_per_s=20480.5,
            decode_tokens_per_s=1536.25,
        ),
    ),
    "presence_staging": presence(
        in_flight=6,
        target_version=7,
        staging=Staging(
            source="objects:weights/versions/8-1-0123abcd", stage="fetching", done_bytes=2**20, total_bytes=2**35
        ),
    ),
    "presence_published": presence(
        weight_version=8,
        in_flight=6,
        target_version=8,
        published=PublishedVersion(
            version=8, stored_bytes=2**25, model_bytes=2**31, chain_length=3, used_bytes=2**32, limit_bytes=2**33
        ),
    ),
    "presence_limits": presence(
        free_slots=255,
        capabilities=capabilities(
            engine_version="0.33.0",
            grammar_backend="xgrammar",
            sampling_limits=SamplingLimits(
                allowed_token_ids=1024, logit_bias=1024, min_tokens_stop_ids=126, bad_words=128, bad_words_tokens=1024
            ),
        ),
    ),
    "presence_digest": presence(weight_version=8, free_slots=4, weight_digest="5" * 64),
    "presence_transfer": presence(
        WorkerState.UPDATING,
        weight_version=8,
        in_flight=6,
        transfer=OpenTransfer(id="sw-1", by="trainer-0", age_s=12.5, left_s=590.0, chunks=3),
    ),
    "presence_log": presence(WorkerState.STARTING, host="node-3", pid=4711, log="/var/log/rollbus/w0.log"),
}
PLACEMENT_VECTORS: dict[str, RequestMessage | WorkerPresence] = {
    "request_siblings": request(
        [1, 2],
        "j",
        sampling=SamplingParams(seed=5),
        group_id="group 1",
        message={"child": 1, "siblings": (Sibling(2, 6), Sibling(0, 4), Sibling(300))},
    ),
    "request_given_id": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        given_id="gsm8k/test.1",
        request=msgspec.Raw(encode(GenerateRequest(prompt_token_ids=[1, 2], request_id="gsm8k/test.1").on_wire())),
    ),
    "request_prefill_siblings": request([1, 2], "k", message={"kv": KvTransfer(), "siblings": (Sibling(1),)}),
    "presence_cache": presence(
        in_flight=6,
        free_slots=250,
        capabilities=capabilities(request_groups=True),
        counters=WorkerCounters(placed=4, placements_refused=1, prompt_tokens=8192, cached_prompt_tokens=5760),
        cache_epoch=3,
        oldest_prefix_s=41.5,
    ),
    "request_placed": request([1, 2], "l", message={"placed_for": "placed_group"}),
    "request_resumed": request(
        [1, 2, 7],
        "m",
        message={
            "attempt": 2,
            "lost": (
                LostAttempt(attempt=0, worker="w0", at=1_700_000_000.5, tokens=1, reason="worker_lost"),
                LostAttempt(attempt=1, at=1_700_000_030.25, tokens=1, reason="worker_lost"),
            ),
        },
    ),
}
MASK = SamplingMask(little_endian(np.array([3, 1]), "<i4"), little_endian(np.array([5, 300, 151_643, 7]), "<i4"))
"""A mask with three ids for the first token and one id for the second."""
MASK_VECTORS: dict[str, RequestMessage | Frame] = {
    "request_sampling_mask": request([1, 2], "i", sampling=SamplingParams(top_k=3), return_sampling_mask=True),
    "frame_sampling_mask": Frame(
        1,
        "incarnation",
        7,
        [],
        [
            chunk(
                "i",
                token_ids_data=little_endian(np.array([300, 7]), "<i4"),
                logprobs_data=little_endian(np.array([-0.5, 0.0]), "<f4"),
                sampling_mask=MASK,
            )
        ],
        0,
        "life-1",
    ),
}
