"""Every limit of the wire format, with its reason. The error at a limit names the limit.

The types of fields that many messages have stand at the end.
"""

from collections import OrderedDict
from typing import Annotated, Final, TypeVar

from msgspec import Meta

MAX_PROMPT_TOKENS: Final = 4_194_304
"""Prompt tokens of one request: 16 MiB as `<i4`. This is above every context window in use and far below NATS's hard
limit of 64 MiB."""
MAX_TOKENS: Final = 4_194_304
"""Generated tokens of one request. As for prompts, the model's context length is the effective limit."""
MAX_POSITION: Final = MAX_PROMPT_TOKENS + MAX_TOKENS
"""Absolute positions and counts of positions: the sum of prompt tokens and generated tokens."""
MAX_TOKEN_ID: Final = 2**31 - 1
"""Token ids, encoded as `<i4`."""
MAX_CHUNK_TOKENS: Final = MAX_TOKENS
"""Tokens in one chunk. A worker that could not send may merge a whole request into one chunk."""
MAX_MASK_IDS: Final = 65_536
"""Ids in the sampling mask of one token: 256 KiB, the maximum for one chunk. A larger `top_k` has no practical
effect."""
MAX_N: Final = 256
"""Samples per prompt; the fleet runs each sample as a separate request."""
MAX_SIBLINGS: Final = MAX_N - 1
"""Further samples in one request message. With the first sample, they are all samples of a request."""
MAX_SEED: Final = 2**63 - 1
"""Seeds, encoded as signed 64-bit integers. Child requests of n > 1 use seed + child."""
MAX_LOGPROBS: Final = 128
"""Most likely tokens per position. Engines usually allow fewer (vLLM: 20) and announce their limit in their
capabilities."""
MAX_STOP_TOKEN_IDS: Final = 1024
"""Stop token ids of a request. The engine compares each with every sampled token."""
MAX_ALLOWED_TOKEN_IDS: Final = 1_048_576
"""Allowed token ids of a request, more than any vocabulary has."""
MAX_LOGIT_BIAS: Final = 4096
"""Entries of a logit bias. Use `allowed_token_ids` for a bias over the whole vocabulary."""
MAX_BAD_WORDS: Final = 4096
"""Forbidden token sequences of a request, and tokens in each sequence."""
MAX_ATTEMPTS: Final = 16
"""Publications of one request. A request that loses more workers indicates another fault."""
MAX_ENGINE_DEATHS: Final = 3
"""Engine deaths before the first token of a request, after which the request is not retried. Two deaths may be the
fault of other requests on these engines."""
MAX_ENGINE_DEATHS_ALONE: Final = 2
"""Engine deaths as above, if at the last death the request was the client's only request without a token. No other
request of the client can then be the cause."""
MAX_DELIVERIES: Final = 16
"""Deliveries of one queue message without a client's acknowledgement, after which the request counts as poison."""
MAX_EXTRA_FIELDS: Final = 64
"""Engine-specific parameters of one request."""
MAX_EXTRA_BYTES: Final = 65_536
"""Bytes of all engine-specific parameters of one request as JSON: enough for a schema of structured output, too few for
a data set."""
MAX_EXTRA_DEPTH: Final = 16
"""Nesting depth of lists and maps in one engine-specific parameter, far below the depth at which decoders overflow
their stack."""
MAX_REMEMBERED_IDS: Final = 65_536
"""Ids of past requests that a client remembers. They distinguish late messages of an old request from a new request
with the same id."""
MAX_GIVEN_ID_CHARS: Final = 512
"""Characters of a request id as its caller writes it. Longer ids than those of `MAX_REQUEST_ID_CHARS` travel once."""
MAX_REQUEST_ID_CHARS: Final = 128
"""Characters of a request id on the wire: enough for a UUID with a prefix. Every chunk carries the id."""
MAX_NAME_CHARS: Final = 256
"""Characters in names of models, sessions and LoRAs. Subjects contain the encoded name of a model, and NATS limits a
control line to 4 KiB."""
MAX_SUBJECT_TOKEN_CHARS: Final = 64
"""Characters in names of fleets, clients and workers, which subjects contain without encoding."""
MAX_SUBJECT_CHARS: Final = 512
"""Characters of a reply subject. NATS limits a control line to 4 KiB."""
MAX_CACHE_SALT_CHARS: Final = 1024
"""Characters of a cache salt, vLLM's own limit."""
MAX_SEEN_COMMANDS: Final = 64
"""Recorded commands whose ids a desired state and a worker remember. Repeats of a command arrive within seconds."""
MAX_CANARY_TOKENS: Final = 1024
"""Generated tokens of a canary; a canary has 8."""
MAX_WORKER_OVERRIDES: Final = 1024
"""Workers with their own registers in a desired state."""
MAX_LORAS: Final = 256
"""Loaded adapters in a desired state, and separately adapters that the desired state remembers as unloaded."""
MAX_PRIORITY: Final = 2**31 - 1
"""Absolute value of a priority; lower is more urgent, as in vLLM."""
MAX_COUNT: Final = 2**63 - 1
"""Counts of a program. Larger integers do not fit a float, and JSON has no limit of its own."""
MAX_WEIGHT_VERSION: Final = 2**31 - 1
"""Weight versions, delivered as i4 per token."""
MAX_TIMEOUT_S: Final = 7 * 24 * 3600.0
"""Seconds in a week: longer than any rollout, so that nothing waits forever."""
DEFAULT_TIMEOUT_S: Final = 3600.0
"""Seconds for requests without `timeout_s`, longer than the longest generation seen in training runs."""
INITIAL_CREDIT_BYTES: Final = 256 * 1024
"""Bytes that a worker may send on a new link before the client's first message. The limit is small because a client may
never read."""
DEFAULT_MAX_UNREAD_BYTES: Final = 1024**3
"""Bytes of results that callers have not read. Above this limit, `complete_many` and `stream_many` send no more
requests."""
DEFAULT_MAX_BUFFERED_BYTES: Final = 256 * 1024**2
"""Bytes of a record's rows that are not on the disk. A disk that takes 50 MB a second writes them in five seconds."""
DEFAULT_MAX_IN_FLIGHT: Final = 512
"""Requests that `complete_many` or `stream_many` keeps open: two full batches of a typical engine (256 sequences)."""
MAX_IN_FLIGHT: Final = 1_000_000
"""Requests that they can keep open: more than a thousand workers run at once."""
MAX_STEP_GROUPS: Final = 65_536
"""Groups in a step of a trainer: more than any batch has, and their results still fit into memory."""
MAX_OVER: Final = 8.0
"""Groups that run at once, as a multiple of the groups that a step needs. Above two, most groups would be carried
over."""
DEFAULT_PREFILL_MIN_TOKENS: Final = 32
"""Minimum tokens of a prompt that goes to a prefill worker first. KV caches are transferred in blocks, and two blocks
of vLLM on a GPU are the smallest useful transfer."""
MAX_LAYERS: Final = 1024
"""Layers in a row of routed experts."""
MAX_TOP_K_EXPERTS: Final = 256
"""Experts chosen per token and layer."""
MAX_EXPERT_CELLS: Final = 262_144
"""Layers times experts of expert counts. The largest models have 61 x 384 = 23,424."""
MAX_EXPERT_COUNTS_BYTES: Final = 1_048_576
"""Compressed bytes of one plane of expert counts. NATS messages with default settings hold no more."""
MAX_EXPERT_VERSIONS: Final = 8
"""Weight versions whose expert counts a worker keeps, so that an update can be compared with the version before it."""
MAX_TIMELINES: Final = 256
"""Attempts and samples of one request that a worker reports, as many as the maximum `n`."""
MAX_TIMELINE_EVENTS: Final = 64
"""Events of one attempt. For a request with more pauses, the worker keeps the first events and the last events."""
MAX_UNIX_S: Final = 253_402_300_799
"""Unix time of an event: the end of the year 9999. Programs cannot show later times as dates."""
MAX_EXPERTS: Final = 65_536
"""Experts per layer; ids are u1 or `<u2`."""
MAX_CHUNKS_PER_FRAME: Final = 65_536
"""Chunks in a frame. A frame holds at most a few chunks for each request of one engine step."""
MAX_KV_PARAMS_BYTES: Final = 131_072
"""Bytes of a connector's KV transfer parameters: ids of forty thousand blocks. A prompt still fits beside them below 1
MiB, the default maximum of NATS servers."""
MAX_UNPROBED: Final = 64
"""Modules that an ack names as not probed. The ack also has the number of all such modules."""
MAX_MODULE_CHARS: Final = 256
"""Characters of a module's name together with the reason why it was not probed."""
MAX_ERROR_CHARS: Final = 4096
"""Characters of an error text for people. The sender cuts longer text."""
_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


class Recent(OrderedDict[_Key, _Item]):
    """A dict with a limit: it keeps the items that were set last, the oldest first."""

    def __init__(self, max_items: int) -> None:
        super().__init__()
        self._max_items = max_items

    def __setitem__(self, key: _Key, value: _Item) -> None:
        """Set an item, which becomes the last one, and remove the oldest items above the limit."""
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._max_items:
            self.popitem(last=False)


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Epoch = Annotated[int, Meta(ge=0, le=2**53)]
"""Number of a recorded command, or of a publisher's lease."""
ErrorText = Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
NonEmptyName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Seconds = Annotated[float, Meta(ge=0)]
Version = Annotated[int, Meta(ge=0, le=MAX_WEIGHT_VERSION)]
"""Version of weights or of an adapter."""
