"""Names of attributes: those of OpenTelemetry's semantic conventions as of 1.40, and our own, below `rollbus.`.

They stand here because the package that has them is an extra; a test compares them with it.
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
"""Who asked."""
CHILD: Final = "rollbus.child"
"""Which of n samples."""
ATTEMPT: Final = "rollbus.attempt"
"""0 for the first."""
ATTEMPTS: Final = "rollbus.attempts"
"""Of the sample that needed most."""
LANE: Final = "rollbus.lane"
"""Of the queue; left out where a request was placed at a worker."""
WORKER: Final = "rollbus.worker"
WORKERS: Final = "rollbus.workers"
LOST_WORKER: Final = "rollbus.lost_worker"
"""What the attempt before was given up at."""
WEIGHT_VERSIONS: Final = "rollbus.weight_versions"
"""Of the weights that sampled, in the order of their first tokens."""
RELEASED: Final = "rollbus.returned_to_queue"
"""The worker gave the request back."""

# Of events.
TOKENS: Final = "rollbus.tokens"
"""Generated until then; of the prompt, where its computation is what happened."""
WEIGHT_VERSION: Final = "rollbus.weight_version"
"""Of the weights from then on."""
REASON: Final = "rollbus.reason"
"""What a pause was for."""
