"""Names of attributes: those of OpenTelemetry's semantic conventions 1.40, and rollbus's own, below `rollbus.`.

They are repeated here because the package with these names is an extra. A test compares both.
"""

from typing import Final

__all__ = [
    "ATTEMPT",
    "ATTEMPTS",
    "CACHED_TOKENS",
    "CHILD",
    "CHOICE_COUNT",
    "CLIENT",
    "ERROR_TYPE",
    "FINISH_REASONS",
    "HTTP_METHOD",
    "HTTP_ROUTE",
    "HTTP_STATUS",
    "INPUT_TOKENS",
    "LANE",
    "LOST_WORKER",
    "MAX_TOKENS",
    "MESSAGING_OPERATION",
    "MESSAGING_SYSTEM",
    "OPERATION",
    "OUTPUT_TOKENS",
    "PROVIDER",
    "REASON",
    "RELEASED",
    "REQUEST_ID",
    "REQUEST_MODEL",
    "RESPONSE_ID",
    "RESPONSE_MODEL",
    "STREAM",
    "TEMPERATURE",
    "TIME_TO_FIRST_CHUNK",
    "TOKENS",
    "TOP_K",
    "TOP_P",
    "URL_PATH",
    "URL_SCHEME",
    "WEIGHT_VERSION",
    "WEIGHT_VERSIONS",
    "WORKER",
    "WORKERS",
]

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
CHOICE_COUNT: Final = "gen_ai.request.choice.count"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
TOP_K: Final = "gen_ai.request.top_k"
STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION: Final = "messaging.operation.type"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"

REQUEST_ID: Final = "rollbus.request_id"
CLIENT: Final = "rollbus.client"
"""The client that sent the request."""
CHILD: Final = "rollbus.child"
"""The index among n samples."""
ATTEMPT: Final = "rollbus.attempt"
"""0 for the first."""
ATTEMPTS: Final = "rollbus.attempts"
"""The attempts of the sample with the most attempts."""
LANE: Final = "rollbus.lane"
"""The lane of the queue; left out if the request was placed at a worker."""
WORKER: Final = "rollbus.worker"
WORKERS: Final = "rollbus.workers"
LOST_WORKER: Final = "rollbus.lost_worker"
"""The worker at which the previous attempt was lost."""
WEIGHT_VERSIONS: Final = "rollbus.weight_versions"
"""The versions of the weights that sampled, in the order of their first tokens."""
RELEASED: Final = "rollbus.returned_to_queue"
"""True if the worker returned the request to the queue."""

# Attributes of events.
TOKENS: Final = "rollbus.tokens"
"""Tokens generated until then. For the end of the prefill, tokens of the prompt."""
WEIGHT_VERSION: Final = "rollbus.weight_version"
"""The version of the weights from then on."""
REASON: Final = "rollbus.reason"
"""The reason of a pause."""
