"""The golden messages of worker presence by name. As in `vectors`, messages are appended and never edited."""

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

PRESENCE_VECTORS: dict[str, WorkerPresence] = {
    "presence_counters": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.FENCED,
        weight_version=7,
        in_flight=0,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        counters=WorkerCounters(requests=3, ended=2, given_up=1, generated_tokens=2**40, credit_stalls=5, fences=1),
    ),
    "presence_paused": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.PAUSED,
        weight_version=7,
        in_flight=3,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        last_error="update_weights: model.safetensors is missing",
        pause_mode="keep",
        queued=1,
        target_version=8,
        epoch=41,
        loras=(LoraInfo(name="style", version=3),),
        lease_age_s=0.25,
    ),
    "presence_holder": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.UPDATING,
        weight_version=7,
        in_flight=0,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        host="node-3",
        pid=4711,
        held_s=58.5,
    ),
    "presence_load": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=7,
        in_flight=6,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
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
    "presence_staging": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=7,
        in_flight=6,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        target_version=7,
        staging=Staging(
            source="objects:weights/versions/8-1-0123abcd", stage="fetching", done_bytes=2**20, total_bytes=2**35
        ),
    ),
    "presence_published": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=8,
        in_flight=6,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        target_version=8,
        published=PublishedVersion(
            version=8,
            stored_bytes=2**25,
            model_bytes=2**31,
            chain_length=3,
            used_bytes=2**32,
            limit_bytes=2**33,
        ),
    ),
    "presence_limits": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=7,
        in_flight=0,
        free_slots=255,
        uptime_s=60.0,
        lease_s=10.0,
        capabilities=Capabilities(
            engine="vllm",
            engine_version="0.33.0",
            max_model_len=4096,
            vocab_size=151_936,
            max_num_seqs=256,
            max_logprobs=20,
            dtype="bfloat16",
            grammar_backend="xgrammar",
            sampling_limits=SamplingLimits(
                allowed_token_ids=1024, logit_bias=1024, min_tokens_stop_ids=126, bad_words=128, bad_words_tokens=1024
            ),
        ),
    ),
    "presence_digest": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=8,
        in_flight=0,
        free_slots=4,
        uptime_s=60.0,
        lease_s=10.0,
        weight_digest="5" * 64,
    ),
    "presence_transfer": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.UPDATING,
        weight_version=8,
        in_flight=6,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        transfer=OpenTransfer(id="sw-1", by="trainer-0", age_s=12.5, left_s=590.0, chunks=3),
    ),
    "presence_log": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.STARTING,
        weight_version=7,
        in_flight=0,
        free_slots=0,
        uptime_s=60.0,
        lease_s=10.0,
        host="node-3",
        pid=4711,
        log="/var/log/rollbus/w0.log",
    ),
}


# The golden messages of placement by name. As in `vectors`, messages are appended and never edited.


PLACEMENT_VECTORS: dict[str, RequestMessage | WorkerPresence] = {
    "request_siblings": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        child=1,
        request=msgspec.Raw(
            encode(
                GenerateRequest(
                    prompt_token_ids=[1, 2], request_id="j", sampling=SamplingParams(seed=5), group_id="group 1"
                )
            )
        ),
        siblings=(Sibling(2, 6), Sibling(0, 4), Sibling(300)),
    ),
    "request_given_id": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        given_id="gsm8k/test.1",
        request=msgspec.Raw(
            encode(GenerateRequest(prompt_token_ids=[1, 2], request_id="gsm8k/test.1").on_wire()),
        ),
    ),
    "request_prefill_siblings": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        kv=KvTransfer(),
        request=msgspec.Raw(encode(GenerateRequest(prompt_token_ids=[1, 2], request_id="k"))),
        siblings=(Sibling(1),),
    ),
    "presence_cache": WorkerPresence(
        worker="w0",
        incarnation="i0",
        model="org/model-1.5",
        state=WorkerState.SERVING,
        weight_version=7,
        in_flight=6,
        free_slots=250,
        uptime_s=60.0,
        lease_s=10.0,
        capabilities=Capabilities(
            engine="vllm",
            engine_version="0.30.0",
            max_model_len=4096,
            vocab_size=151_936,
            max_num_seqs=256,
            max_logprobs=20,
            dtype="bfloat16",
            request_groups=True,
        ),
        counters=WorkerCounters(placed=4, placements_refused=1, prompt_tokens=8192, cached_prompt_tokens=5760),
        cache_epoch=3,
        oldest_prefix_s=41.5,
    ),
    "request_placed": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        request=msgspec.Raw(encode(GenerateRequest(prompt_token_ids=[1, 2], request_id="l"))),
        placed_for="placed_group",
    ),
    "request_resumed": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        attempt=2,
        request=msgspec.Raw(encode(GenerateRequest(prompt_token_ids=[1, 2, 7], request_id="m"))),
        lost=(
            LostAttempt(attempt=0, worker="w0", at=1_700_000_000.5, tokens=1, reason="worker_lost"),
            LostAttempt(attempt=1, at=1_700_000_030.25, tokens=1, reason="worker_lost"),
        ),
    ),
}


# The golden messages of sampling masks by name. As in `vectors`, messages are appended and never edited.


MASK = SamplingMask(little_endian(np.array([3, 1]), "<i4"), little_endian(np.array([5, 300, 151_643, 7]), "<i4"))
"""A mask with three ids for the first token and one id for the second."""

MASK_VECTORS: dict[str, RequestMessage | Frame] = {
    "request_sampling_mask": RequestMessage(
        client="trainer-0",
        incarnation="life-1",
        request=msgspec.Raw(
            encode(
                GenerateRequest(
                    prompt_token_ids=[1, 2],
                    request_id="i",
                    sampling=SamplingParams(top_k=3),
                    return_sampling_mask=True,
                )
            )
        ),
    ),
    "frame_sampling_mask": Frame(
        1,
        "incarnation",
        7,
        [],
        [
            Chunk(
                request_id="i",
                attempt=0,
                child=0,
                chunk_index=0,
                weight_version=7,
                token_ids_data=little_endian(np.array([300, 7]), "<i4"),
                logprobs_data=little_endian(np.array([-0.5, 0.0]), "<f4"),
                sampling_mask=MASK,
            )
        ],
        0,
        "life-1",
    ),
}
