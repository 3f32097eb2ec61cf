"""Tokens with their logprobs, weight versions and routed experts as JSON: all of an answer, or those of one chunk.

Logprobs and routed experts are written in pieces, because those of a long answer have many megabytes as text and
millions of objects.
"""

import itertools
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ... import bus
from ...bus.protocol.stream.result_arrays import join_chunks
from ...schemas.chunk import JSON_MINUS_INFINITY
from ...schemas.decoding import JsonObject
from ...schemas.errors import ErrorCode
from ...schemas.rows import Float32s, Int32s, RowDtype, Rows, dtype_of, expected_rows, no_rows
from .calls import object_json
from .errors import HttpError
from .requests import RequestTarget

BLOCK: Final = 1024
"""Number of positions whose logprobs are converted to objects at a time."""


class Scored(NamedTuple):
    """A token at a position, or a likely alternative at that position."""

    token_id: int
    logprob: float
    """-9999 for -inf, as in vLLM, because JSON has no infinity. NaN if there is no logprob; JSON then has null."""
    rank: int | None
    """1 for the most likely token; None if the token is not among the requested alternatives."""


class ScoredBlocks(Protocol):
    """Tokens and their log probabilities, in blocks of positions."""

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """Yield blocks with the tokens of each position. The first token of a position is its actual token."""


class Scores(msgspec.Struct, frozen=True):
    """Tokens with their log probabilities, and likely alternatives at the same positions."""

    ids: Int32s
    """i4[k]."""
    logprobs: Float32s | None = None
    """f4[k]; None if not requested."""
    top_ids: Int32s | None = None
    """i4[k, width], most likely first; None if not requested."""
    top_logprobs: Float32s | None = None
    """f4[k, width]."""

    def check(self, width: int, what: str) -> None:
        """Check that the logprobs match the tokens.

        Args:
            width: number of requested alternatives.
            what: name of the tokens in error messages.

        Raises:
            HttpError: 502, the number of logprobs is wrong, or a logprob is not a number.
        """
        for values in (self.logprobs, self.top_logprobs) if width else (self.logprobs,):
            found = 0 if values is None else len(values)
            if found != len(self.ids):
                raise _broken(f"{len(self.ids)} {what} came with {found} logprobs")
            if values is None:
                continue
            # NaN propagates. numpy takes longer for the one token of a chunk.
            most = values.item() if values.size == 1 else np.maximum.reduce(values, axis=None, initial=-np.inf)
            if not most < np.inf:
                raise _broken(f"a logprob of the {what} is not a number")

    def blocks(self) -> Iterator[list[list[Scored]]]:
        """Yield some positions at a time, each with its own token and then the alternatives, most likely first."""
        for at in range(0, len(self.ids), BLOCK):
            here = slice(at, at + BLOCK)
            ids, logprobs = self.ids[here].tolist(), json_logprobs(self.logprobs, here)
            if self.top_ids is None:
                yield [[Scored(token_id, logprob, None)] for token_id, logprob in zip(ids, logprobs, strict=True)]
                continue
            top_ids = self.top_ids[here].tolist()
            top_logprobs = json_logprobs(self.top_logprobs, here) or top_ids
            yield [_position(*each) for each in zip(ids, logprobs, top_ids, top_logprobs, strict=True)]

    def cut(self, kept: int) -> "Scores":
        """Return the first `kept` positions."""
        arrays = (self.ids, self.logprobs, self.top_ids, self.top_logprobs)
        return Scores(*(None if array is None else array[:kept] for array in arrays))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """Return consecutive parts as one."""
        return cls(*(_join(parts, name) for name in cls.__struct_fields__))


def _position(own_id: int, own_logprob: float, ids: Sequence[int], logprobs: Sequence[float]) -> list[Scored]:
    own_rank = ids.index(own_id) + 1 if own_id in ids else None
    tops = map(Scored, ids, logprobs, itertools.count(1))
    return [Scored(own_id, own_logprob, own_rank), *(top for top in tops if top.token_id != own_id)]


def json_logprobs(logprobs: Float32s | None, here: slice = slice(None)) -> list[float]:
    """Return the logprobs in the slice as JSON represents them. Return an empty list if they were not requested."""
    if logprobs is None:
        return []
    values: list[float] = logprobs[here].tolist()
    # numpy takes longer than `min` for the few tokens of a chunk. NaN and alternatives are left to numpy.
    if logprobs.ndim > 1 or not min(values, default=0.0) >= JSON_MINUS_INFINITY:
        values = np.maximum(logprobs[here], JSON_MINUS_INFINITY).tolist()
    return values


def _join(parts: Sequence[object], name: str) -> Any:
    """Return the arrays with this name of consecutive parts as one. Chunks without tokens have none."""
    arrays = list(map(attrgetter(name), parts))
    there = list(compress(arrays, map(is_not, arrays, repeat(None))))
    return np.concatenate(there) if there else None


def _broken(message: str) -> HttpError:
    return HttpError(502, message, code=ErrorCode.PROTOCOL_ERROR)


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Some tokens of one answer, or all of them."""

    scores: Scores
    """Token ids and their log probabilities."""
    weight_versions: Int32s
    """i4[k]."""
    lora_versions: Int32s | None = None
    """i4[k]: versions of the adapter; None without one."""
    kv_from: int | None = None
    """The token before which the engine last computed all KV again; -1: never. None: not reported."""
    rows: Rows | None = None
    """u1|u2[rows, layers, top_k]."""
    start: int = 0
    """Absolute position of the first row."""
    masks: bus.TokenMasks | None = None
    """For each token, the ids from which it was sampled."""
    of_prompt: Scores | None = None
    """Scores of prompt tokens. The first prompt token has no logprob."""
    finish_reason: bus.FinishReason | None = None
    """None if more tokens follow."""
    stop_token: int | None = None
    """The one of `stop_token_ids` that ended the answer."""
    cached_tokens: int | None = None
    """Number of prompt tokens that the engine found in its prefix cache, if known."""
    attempt: int = 0
    """Number of the attempt that sampled the last token, from 0."""
    first_worker: str | None = None
    """The worker that generated the first token, if known."""
    worker: str | None = None
    """The worker that generated the last token, if known. It differs from the first worker if a prefill worker computed
    the prompt, or if a worker was lost."""

    @property
    def ids(self) -> Int32s:
        """i4[k]."""
        return self.scores.ids

    @classmethod
    def of_generation(cls, generation: bus.Generation, request: bus.GenerateRequest) -> "Tokens":
        """Return all tokens of an answer."""
        of_prompt = None
        if generation.prompt_logprobs is not None:
            of_prompt = Scores(
                _prompt_ids(request)[1:],
                generation.prompt_logprobs,
                generation.prompt_top_token_ids,
                generation.prompt_top_logprobs,
            )
        return cls(
            scores=Scores(generation.token_ids, generation.logprobs, generation.top_token_ids, generation.top_logprobs),
            weight_versions=generation.weight_versions,
            lora_versions=generation.lora_versions,
            rows=generation.routed_experts,
            start=generation.start,
            masks=generation.sampling_mask,
            of_prompt=of_prompt,
            finish_reason=generation.finish_reason,
            stop_token=generation.stop_reason,
            cached_tokens=generation.cached_tokens,
            attempt=generation.attempts - 1,
            first_worker=generation.worker_ids[0] if generation.worker_ids else None,
            worker=generation.worker_ids[-1] if generation.worker_ids else None,
        )

    @classmethod
    def of_chunks(cls, chunks: Sequence[bus.Chunk], request: bus.GenerateRequest) -> "Tokens":
        """Return the tokens of chunks that follow each other in one attempt of an answer."""
        last, end, arrays = chunks[-1], chunks[-1].end, join_chunks(chunks)
        num_tokens, start = 0, request.routed_experts_prompt_start
        kv_from: int | None = -1
        of_prompt: Scores | None = None
        for chunk in chunks:
            if chunk.kv_recomputed is not False and chunk.token_ids_data:
                kv_from = num_tokens if chunk.kv_recomputed else None
            num_tokens += chunk.num_tokens
        if arrays["routed_experts"] is not None:
            start = next(chunk.routed_experts.start for chunk in chunks if chunk.routed_experts is not None)
        if (logprobs := arrays.get("prompt_logprobs")) is not None:
            first = next(chunk.prompt_logprobs.start for chunk in chunks if chunk.prompt_logprobs is not None)
            ids = _prompt_ids(request)[first : first + len(logprobs)]
            of_prompt = Scores(ids, logprobs, arrays["prompt_top_token_ids"], arrays["prompt_top_logprobs"])
        return cls(
            scores=Scores(
                arrays["token_ids"], arrays["logprobs"], arrays.get("top_token_ids"), arrays.get("top_logprobs")
            ),
            weight_versions=arrays["weight_versions"],
            lora_versions=arrays.get("lora_versions"),
            kv_from=kv_from,
            rows=arrays["routed_experts"],
            start=start,
            masks=arrays.get("sampling_mask"),
            of_prompt=of_prompt,
            finish_reason=last.finish_reason,
            stop_token=None if end is None else end.stop_reason,
            cached_tokens=None if end is None else end.cached_tokens,
            attempt=last.attempt,
            first_worker=chunks[0].worker_id,
            worker=last.worker_id,
        )

    @classmethod
    def joined(cls, parts: Sequence["Tokens"]) -> "Tokens":
        """Return consecutive parts as one. The last part has the finish reason."""
        if len(parts) == 1:
            return parts[0]
        of_prompt = [part.of_prompt for part in parts if part.of_prompt is not None]
        at = 0
        kv_from: int | None = -1
        for part in parts:
            num_tokens = len(part.scores.ids)
            if part.kv_from != -1 and num_tokens:
                kv_from = None if part.kv_from is None else at + part.kv_from
            at += num_tokens
        return replace(
            parts[-1],
            kv_from=kv_from,
            scores=Scores.joined([part.scores for part in parts]),
            weight_versions=_join(parts, "weight_versions"),
            lora_versions=_join(parts, "lora_versions"),
            rows=_join(parts, "rows"),
            start=next((part.start for part in parts if part.rows is not None), parts[-1].start),
            masks=bus.TokenMasks.joined_of_all([part.masks for part in parts if len(part.ids)]),
            of_prompt=Scores.joined(of_prompt) if of_prompt else None,
            first_worker=parts[0].first_worker,
        )

    def cut(self, kept: int, past: int) -> "Tokens":
        """Return the first `kept` tokens, and the rows of positions before `past`."""
        if kept == len(self.ids):
            return self
        return replace(
            self,
            scores=self.scores.cut(kept),
            # A recomputation after the last kept token says nothing about an earlier one.
            kv_from=None if (self.kv_from or 0) >= kept else self.kv_from,
            weight_versions=self.weight_versions[:kept],
            lora_versions=None if self.lora_versions is None else self.lora_versions[:kept],
            rows=None if self.rows is None else self.rows[: max(past - self.start, 0)],
            masks=None if self.masks is None else self.masks.cut(kept),
        )


def _prompt_ids(request: bus.GenerateRequest) -> Int32s:
    return np.asarray(request.prompt_token_ids, "i4")


def prompt_list(request: bus.GenerateRequest) -> list[int]:
    """Return the token ids of a prompt for JSON."""
    ids: list[int] = np.asarray(request.prompt_token_ids).tolist()
    return ids


def whole_rows(request: bus.GenerateRequest, target: RequestTarget, tokens: Tokens) -> Rows | None:
    """Return the rows of a whole answer; None if its model has no experts.

    Raises:
        HttpError: 502, some rows are missing.
    """
    routing, rows = target.capabilities.routed_experts, tokens.rows
    if rows is None:
        if routing is None:
            return None
        rows = no_rows(routing.num_layers, routing.top_k, routing.dtype)
    expected = expected_rows(request.prompt_len, request.routed_experts_prompt_start, len(tokens.ids))
    if len(rows) < expected:
        raise _broken(f"{len(tokens.ids)} tokens came with {len(rows)} rows of routed experts, not {expected}")
    return rows[:expected]


def prompt_scores(request: bus.GenerateRequest, tokens: Tokens) -> Scores | None:
    """Return the scores of all prompt tokens except the first.

    Return None if they were not requested, or if the request was aborted before they arrived.

    Raises:
        HttpError: 502, some scores are missing, or a logprob is not a number.
    """
    width = request.sampling.prompt_logprobs
    if width is None or not len(tokens.ids):
        return None
    found = tokens.of_prompt
    if found is None or len(found.ids) != request.prompt_len - 1:
        if request.prompt_len == 1:
            return Scores(np.empty(0, "i4"))
        raise _broken(f"{request.prompt_len - 1} tokens of the prompt came without logprobs")
    if len(found.ids):
        found.check(width, "tokens of the prompt")
    return found


class CachedTokens(msgspec.Struct):
    """Composition of `prompt_tokens`."""

    cached_tokens: int
    """Number of prompt tokens that the engine found in its prefix cache."""


class Usage(msgspec.Struct):
    """Token counts of the request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None
    """Null if the engine does not report it."""


class OfPrompt(msgspec.Struct, gc=False):
    """Log probability of a prompt token, or of a likely alternative at the same position."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class TopToken(msgspec.Struct, gc=False):
    """A likely token at a position, with its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class SampledToken(TopToken):
    """A token of the answer, with its log probability."""

    top_logprobs: list[TopToken]


def list_json(blocks: Iterable[list[Any]]) -> Iterator[bytes]:
    """Yield a JSON array, block by block."""
    before = b"["
    for block in blocks:
        yield before + msgspec.json.encode(block)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def lists_json(
    scores: ScoredBlocks, lists: Mapping[str, Callable[[list[list[Scored]]], list[Any]]], **others: object
) -> JsonObject | Iterator[bytes]:
    """Return a JSON object with several lists about the same positions, and with `others`.

    Args:
        lists: by name, returns the items for the positions of a block.
    """
    found = list(itertools.islice(scores.blocks(), 2))
    if len(found) < 2:
        block = found[0] if found else []
        return {name: make(block) for name, make in lists.items()} | others
    # The blocks are made again for each list, because those of a long answer have millions of objects.
    return object_json({name: list_json(map(make, scores.blocks())) for name, make in lists.items()} | others)


def prompt_logprobs_json(scores: Scores, text_of: Callable[[int], str] | None) -> Iterator[bytes]:
    """Yield vLLM's list `prompt_logprobs`: null for the first token, then objects by token id.

    Args:
        text_of: returns a token's text, if the answer includes it.
    """
    blocks = (
        [
            {
                each.token_id: OfPrompt(each.logprob, each.rank, None if text_of is None else text_of(each.token_id))
                for each in position
            }
            for position in block
        ]
        for block in scores.blocks()
    )
    yield from list_json(itertools.chain([[None]], blocks))


RowsFormat = Literal["object", "npy"]
"""Formats of routed experts in a choice: an object, or vLLM's string."""
RowsJson = Callable[[Rows, int], Iterator[bytes]]
"""Yields the JSON of rows from an absolute position."""

ENCODED_BYTES = 3 * 64 * 1024
"""Bytes that are encoded at a time: a multiple of three, so that base64 needs padding only at the end."""
DTYPE_NAMES: Final[dict[RowDtype, str]] = {"u1": "uint8", "<u2": "uint16"}
"""numpy's names of the dtypes, without the byte order, which is always little-endian."""


def routed_experts_json(rows: Rows, start: int) -> Iterator[bytes]:
    """Yield `{"data": base64, "shape": [rows, layers, top_k], "start": n, "dtype": name}` in pieces, without blanks.

    `data` is the first field, because clients cut it out of the answer's bytes without parsing the JSON.

    Args:
        rows: u1|<u2[num_rows, num_layers, top_k].
        start: absolute position of row 0.
    """
    return _object_json(rows, start, DTYPE_NAMES[dtype_of(rows)])


def smallest_rows_json(rows: Rows, start: int) -> Iterator[bytes]:
    """Yield the same as `routed_experts_json`, in the smallest of uint8, int16 and int32 that holds the largest id."""
    largest = int(rows.max(initial=0))
    name = next(each for each in ("uint8", "int16", "int32") if largest <= np.iinfo(each).max)
    return _object_json(rows.astype(np.dtype(name).newbyteorder("<"), copy=False), start, name)


def _object_json(rows: npt.NDArray[Any], start: int, dtype_name: str) -> Iterator[bytes]:
    yield b'{"data":"'
    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    for at in range(0, len(data), ENCODED_BYTES):
        yield b2a_base64(data[at : at + ENCODED_BYTES], newline=False)
    rest = {"shape": rows.shape, "start": start, "dtype": dtype_name}
    yield b'",' + msgspec.json.encode(rest)[1:]


def rows_json(wanted: RowsFormat | None, *, npy: bool) -> RowsJson:
    """Return the format that a request asks for.

    Args:
        wanted: the format in the request; None: that of the service.
        npy: True if the format of the service is vLLM's.
    """
    return _npy_json if wanted == "npy" or (wanted is None and npy) else routed_experts_json


def _npy_json(rows: Rows, _start: int) -> Iterator[bytes]:
    """Yield the rows as vLLM's server returns them: a string with the base64 of a `.npy` file."""
    header = BytesIO()
    array = np.ascontiguousarray(rows)
    described = np.lib.format.header_data_from_array_1_0(array)  # type: ignore[no-untyped-call]
    np.lib.format.write_array_header_1_0(header, described)  # type: ignore[no-untyped-call]
    data = array.reshape(-1).view(np.uint8).data
    first = ENCODED_BYTES - len(header.getvalue())
    yield b'"'
    yield b2a_base64(header.getvalue() + data[:first], newline=False)
    for at in range(first, len(data), ENCODED_BYTES):
        yield b2a_base64(data[at : at + ENCODED_BYTES], newline=False)
    yield b'"'
