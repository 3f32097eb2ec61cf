"""The sizes of chunks before they are encoded."""

from ....schemas.chunk import Chunk, ChunkError, TopLogprobs

__all__ = ["CHUNK_OVERHEAD_BYTES", "chunk_bytes", "error_bytes", "text_bytes", "top_bytes"]

CHUNK_OVERHEAD_BYTES = 256
"""More than msgpack needs for the numbers, headers and nil fields of one chunk."""


def chunk_bytes(chunk: Chunk) -> int:
    """Return an upper bound of the encoded size of `chunk` in bytes."""
    # This runs for every chunk. Most chunks have none of the conditional fields.
    size = CHUNK_OVERHEAD_BYTES + text_bytes(chunk.request_id) + len(chunk.token_ids_data)
    if chunk.logprobs_data is not None:
        size += len(chunk.logprobs_data)
    if chunk.routed_experts is not None:
        size += len(chunk.routed_experts.data)
    if chunk.top_logprobs is not None:
        size += top_bytes(chunk.top_logprobs)
    if chunk.sampling_mask is not None:
        size += len(chunk.sampling_mask.counts_data) + len(chunk.sampling_mask.token_ids_data)
    if chunk.prompt_logprobs is not None:
        size += len(chunk.prompt_logprobs.logprobs_data) + top_bytes(chunk.prompt_logprobs.top)
    if chunk.traceparent is not None:
        size += text_bytes(chunk.traceparent)
    if chunk.end is not None:
        size += error_bytes(chunk.end.error) + len(chunk.end.kv_params or b"")
    return size


def text_bytes(text: str) -> int:
    """Return the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def top_bytes(top: TopLogprobs | None) -> int:
    """Return the size of the arrays of top logprobs."""
    return 0 if top is None else len(top.token_ids_data) + len(top.logprobs_data)


def error_bytes(error: ChunkError | None) -> int:
    """Return the size of the texts of an error."""
    if error is None:
        return 0
    return sum(text_bytes(text) for text in (error.message, error.field, error.problem, error.allowed))
