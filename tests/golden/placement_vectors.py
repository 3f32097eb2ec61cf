"""The golden messages of placement by name. As in `vectors`, messages are appended and never edited."""

import msgspec

from rollbus.schemas.messages import KvTransfer, RequestMessage, Sibling, encode
from rollbus.schemas.presence import Capabilities, WorkerCounters, WorkerPresence, WorkerState
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.schemas.telemetry import LostAttempt

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
