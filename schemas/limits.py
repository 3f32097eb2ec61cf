"""Every bound of the wire, with its reason. Reaching one is a defined outcome: the error names the limit."""

from typing import Final

__all__ = [
    "DEFAULT_MAX_IN_FLIGHT",
    "DEFAULT_MAX_UNREAD_BYTES",
    "DEFAULT_PREFILL_MIN_TOKENS",
    "DEFAULT_TIMEOUT_S",
    "INITIAL_CREDIT_BYTES",
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_ATTEMPTS",
    "MAX_BAD_WORDS",
    "MAX_CACHE_SALT_CHARS",
    "MAX_CANARY_TOKENS",
    "MAX_CHUNKS_PER_FRAME",
    "MAX_CHUNK_TOKENS",
    "MAX_COUNT",
    "MAX_DELIVERIES",
    "MAX_ENGINE_DEATHS",
    "MAX_ENGINE_DEATHS_ALONE",
    "MAX_ERROR_CHARS",
    "MAX_EXPERTS",
    "MAX_EXPERT_CELLS",
    "MAX_EXPERT_COUNTS_BYTES",
    "MAX_EXPERT_VERSIONS",
    "MAX_EXTRA_BYTES",
    "MAX_EXTRA_DEPTH",
    "MAX_EXTRA_FIELDS",
    "MAX_KV_PARAMS_BYTES",
    "MAX_LAYERS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_LORAS",
    "MAX_MASK_IDS",
    "MAX_MODULE_CHARS",
    "MAX_N",
    "MAX_NAME_CHARS",
    "MAX_OVER",
    "MAX_POSITION",
    "MAX_PRIORITY",
    "MAX_PROMPT_TOKENS",
    "MAX_REMEMBERED_IDS",
    "MAX_REQUEST_ID_CHARS",
    "MAX_SEED",
    "MAX_SEEN_COMMANDS",
    "MAX_SIBLINGS",
    "MAX_STEP_GROUPS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_SUBJECT_CHARS",
    "MAX_SUBJECT_TOKEN_CHARS",
    "MAX_TIMELINES",
    "MAX_TIMELINE_EVENTS",
    "MAX_TIMEOUT_S",
    "MAX_TOKENS",
    "MAX_TOKEN_ID",
    "MAX_TOP_K_EXPERTS",
    "MAX_UNIX_S",
    "MAX_UNPROBED",
    "MAX_WEIGHT_VERSION",
    "MAX_WORKER_OVERRIDES",
]

MAX_PROMPT_TOKENS: Final = 4_194_304
"""16 MiB as `<i4`, above every context window in use and far below NATS's hard limit of 64 MiB."""
MAX_TOKENS: Final = 4_194_304
"""Generated tokens of one request; as for prompts, the model's own context is the bound that matters."""
MAX_POSITION: Final = MAX_PROMPT_TOKENS + MAX_TOKENS
"""Absolute positions, and counts of positions: prompt and generated tokens together."""
MAX_TOKEN_ID: Final = 2**31 - 1
"""Token ids travel as `<i4`."""
MAX_CHUNK_TOKENS: Final = MAX_TOKENS
"""Tokens in one chunk: a worker that could not send may merge all of a request into one."""
MAX_MASK_IDS: Final = 65_536
"""Ids in one token's sampling mask: 256 KiB, as much as one chunk holds. A `top_k` above that bounds nothing."""
MAX_N: Final = 256
"""Samples per prompt; each is a request of its own to the fleet."""
MAX_SIBLINGS: Final = MAX_N - 1
"""Further samples in one request message: with the first, all that a request can ask for."""
MAX_SEED: Final = 2**63 - 1
"""Seeds travel as signed 64-bit integers; children of n > 1 use seed + child."""
MAX_LOGPROBS: Final = 128
"""Alternatives per token; engines usually allow fewer (vLLM: 20) and say so in their capabilities."""
MAX_STOP_TOKEN_IDS: Final = 1024
"""Each is compared with every sampled token."""
MAX_ALLOWED_TOKEN_IDS: Final = 1_048_576
"""More than any vocabulary has."""
MAX_LOGIT_BIAS: Final = 4096
"""Entries; a bias over the whole vocabulary belongs into `allowed_token_ids`."""
MAX_BAD_WORDS: Final = 4096
"""Token sequences that must not be generated, and tokens in each."""
MAX_ATTEMPTS: Final = 16
"""Publications of one request: whoever loses more workers than that has another problem."""
MAX_ENGINE_DEATHS: Final = 3
"""Engines that may die before they have made a token of a request: then it is not tried again. Two may be the fault of
requests beside it."""
MAX_ENGINE_DEATHS_ALONE: Final = 2
"""The same where the request was the client's only one without a token at the last of these engines: nothing else of
the client can be the cause."""
MAX_DELIVERIES: Final = 16
"""How often the queue hands out one message that no client confirms before it counts as poison."""
MAX_EXTRA_FIELDS: Final = 64
"""Engine-specific parameters of one request."""
MAX_EXTRA_BYTES: Final = 65_536
"""All engine-specific parameters of one request as JSON: a schema for structured output fits, a data set does not."""
MAX_EXTRA_DEPTH: Final = 16
"""Lists and maps inside each other in one engine-specific parameter; far below where decoders overflow their stack."""
MAX_REMEMBERED_IDS: Final = 65_536
"""Ids of past requests that a client remembers, to tell what is late of them from a new request of the same id."""
MAX_REQUEST_ID_CHARS: Final = 128
"""Long enough for a UUID with a prefix; the id stands in every chunk."""
MAX_NAME_CHARS: Final = 256
"""Names of models, sessions and LoRAs; a model's stands in subjects, encoded, and NATS ends a control line at 4 KiB."""
MAX_SUBJECT_TOKEN_CHARS: Final = 64
"""Names of fleets, clients and workers: they stand in subjects as they are."""
MAX_SUBJECT_CHARS: Final = 512
"""Of a reply subject: NATS ends a control line at 4 KiB."""
MAX_CACHE_SALT_CHARS: Final = 1024
"""vLLM's own bound."""
MAX_SEEN_COMMANDS: Final = 64
"""Recorded commands that a desired state and a worker know by their ids: repeats come within seconds."""
MAX_CANARY_TOKENS: Final = 1024
"""Generated tokens of a canary; there are 8."""
MAX_WORKER_OVERRIDES: Final = 1024
"""Workers for which a desired state holds commands of their own."""
MAX_LORAS: Final = 256
"""Adapters that a desired state has loaded, and as many of which it remembers that they were unloaded."""
MAX_PRIORITY: Final = 2**31 - 1
"""Either sign; lower is more urgent, as in vLLM."""
MAX_COUNT: Final = 2**63 - 1
"""Of anything that a program counts; larger integers become no float, and JSON has no limit of its own."""
MAX_WEIGHT_VERSION: Final = 2**31 - 1
"""Weight versions are delivered as i4 per token."""
MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
"""A week: longer than any rollout, short enough that nothing waits for ever."""
DEFAULT_TIMEOUT_S: Final = 3600.0
"""For requests that name no `timeout_s`: longer than the longest generation seen in training runs."""
INITIAL_CREDIT_BYTES: Final = 256 * 1024
"""What a worker may send on a new link before it has heard from the client: small, for a client that never reads."""
DEFAULT_MAX_UNREAD_BYTES: Final = 1024**3
"""Results that a caller of `complete_many` has not taken: above it no more requests are sent."""
DEFAULT_MAX_IN_FLIGHT: Final = 512
"""Requests that `complete_many` keeps open: two full batches of a typical engine (256 sequences)."""
MAX_STEP_GROUPS: Final = 65_536
"""Groups in a step of a trainer: more than any batch, and their results still fit into memory."""
MAX_OVER: Final = 8.0
"""Groups that run at once, as a multiple of those that a step needs; above two, most would be carried over."""
DEFAULT_PREFILL_MIN_TOKENS: Final = 32
"""Of a prompt that goes to a prefill worker first. KV travels in blocks, and two of vLLM's on GPUs are the least that
may be worth it."""
MAX_LAYERS: Final = 1024
"""Layers in a routing row."""
MAX_TOP_K_EXPERTS: Final = 256
"""Experts chosen per token and layer."""
MAX_EXPERT_CELLS: Final = 262_144
"""Layers times experts of counts; the largest models have 61 x 384 = 23,424."""
MAX_EXPERT_COUNTS_BYTES: Final = 1_048_576
"""One plane of counts, compressed: more fits into no message of NATS as it is set up by default."""
MAX_EXPERT_VERSIONS: Final = 8
"""Versions of the weights of which a worker keeps counts: an update shows by comparison with the one before."""
MAX_TIMELINES: Final = 256
"""Attempts and samples of one request that a worker tells about: as many as `n` may be."""
MAX_TIMELINE_EVENTS: Final = 64
"""Of one attempt: a request that lives through more pauses is told by the first and the last of them."""
MAX_UNIX_S: Final = 253_402_300_799
"""Unix time of an event: the end of the year 9999. Later times are dates to no program that shows them."""
MAX_EXPERTS: Final = 65_536
"""Experts per layer: ids are u1 or `<u2`."""
MAX_CHUNKS_PER_FRAME: Final = 65_536
"""A frame holds at most a few chunks for each request of one engine step."""
MAX_KV_PARAMS_BYTES: Final = 131_072
"""Where a prompt's KV lies, as its connector says: ids of forty thousand blocks, and still room for the prompt below
the 1 MiB that NATS servers take by default."""
MAX_UNPROBED: Final = 64
"""Modules that an ack names as not probed; it gives the number of all."""
MAX_MODULE_CHARS: Final = 256
"""A module's name, and the reason why it was not probed."""
MAX_ERROR_CHARS: Final = 4096
"""Error text is for people; longer text is cut by the sender."""
