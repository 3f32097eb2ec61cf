"""NeMo-RL's batches: its prompts as requests, and generations as its tensors. Without input and output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...bus.client.generation import Generation
from ...schemas.chunk import FinishReason
from ...schemas.errors import InvalidRequest
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from ...schemas.rows import expected_rows
from ...schemas.sampling import SamplingParams
from ..rows import convert_rows

NOT_SAMPLED: Final = -1
"""Weight version of positions that no worker sampled."""
ROW_DTYPES: Final = (("int8", 128), ("int16", 32_768))
"""NeMo-RL's dtypes of expert ids, and the most experts that each is for. Models with more experts have int32."""
MAX_STOPS: Final = 16
"""Maximum number of interruptions of one answer, for example by `pause --mode abort`."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sample of a batch."""

    token_ids: Sequence[int]
    stop_strings: tuple[str, ...]


def prompts_of(data: Mapping[str, Any], config: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a batch.

    Args:
        data: `input_ids`, integers [batch, length] padded on the right; `input_lengths`, integers [batch]; and
            optionally `stop_strings`, for each sample a string, a list of strings or None.
        config: NeMo-RL's generation config. `_pad_token_id` is the padding. `stop_strings` hold for all samples.

    Raises:
        InvalidRequest: a field is missing, has another shape, or a position after a prompt is not padding.
    """
    for name in ("input_ids", "input_lengths"):
        if name not in data:
            raise InvalidRequest(field=name, problem="is missing", allowed="a tensor of integers")
    ids, lengths = data["input_ids"], data["input_lengths"]
    if ids.ndim != 2 or tuple(lengths.shape) != (len(ids),):
        problem = f"has the shape {tuple(ids.shape)} beside input_lengths of shape {tuple(lengths.shape)}"
        raise InvalidRequest(field="input_ids", problem=problem, allowed="[batch, length] and [batch]")
    if "vllm_content" in data:
        raise InvalidRequest(field="vllm_content", problem="is set", allowed="none: prompts are token ids")
    stops = data.get("stop_strings") or [None] * len(ids)
    if len(stops) != len(ids):
        raise InvalidRequest(
            field="stop_strings", problem=f"has {len(stops)} items", allowed=f"{len(ids)}, one a sample"
        )
    pad, prompts = config["_pad_token_id"], []
    for number, (row, length, stop) in enumerate(zip(ids.tolist(), lengths.tolist(), stops, strict=True)):
        if not 1 <= length <= len(row):
            field = f"input_lengths[{number}]"
            raise InvalidRequest(field=field, problem=f"is {length}", allowed=f"1 to {len(row)}")
        if any(token != pad for token in row[length:]):
            problem = f"has a token after its {length} tokens"
            raise InvalidRequest(field=f"input_ids[{number}]", problem=problem, allowed=f"padding {pad} on the right")
        prompts.append(Prompt(row[:length], _stop_strings(number, stop, config.get("stop_strings"))))
    return prompts


def _stop_strings(number: int, own: Any, common: Any) -> tuple[str, ...]:
    found: list[Any] = []
    for given in (common, own):
        found += [given] if isinstance(given, str) else list(given or ())
    if any(not isinstance(stop, str) or not stop for stop in found):
        allowed = "strings of at least one character"
        raise InvalidRequest(field=f"stop_strings[{number}]", problem=f"is {own!r}", allowed=allowed)
    return tuple(dict.fromkeys(found))


def request_of(
    prompt: Prompt, config: Mapping[str, Any], capabilities: Capabilities, *, greedy: bool, model: str | None
) -> GenerateRequest:
    """Return the request for a prompt, with as many new tokens as the context has room for.

    Raises:
        InvalidRequest: the prompt fills the model's context, or a value of the config is out of range.
    """
    room = capabilities.max_model_len - len(prompt.token_ids)
    if room < 1:
        problem = f"has {len(prompt.token_ids)} tokens"
        allowed = f"1 to {capabilities.max_model_len - 1}, less than the model's context"
        raise InvalidRequest(field="input_lengths", problem=problem, allowed=allowed)
    sampling = SamplingParams(
        max_tokens=min(config["max_new_tokens"], room),
        temperature=0.0 if greedy else config["temperature"],
        top_p=1.0 if greedy else config["top_p"],
        top_k=0 if greedy else config["top_k"] or 0,
        stop_token_ids=config.get("stop_token_ids") or (),
    )
    return GenerateRequest(prompt_token_ids=list(prompt.token_ids), sampling=sampling, model=model)


class Unfinished:
    """Requests of a batch without a complete answer. Answers that an operator interrupted are continued and joined."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._parts: dict[int, Generation] = {}
        self._open = list(requests)

    def rounds(self) -> Iterator[list[GenerateRequest]]:
        """Yield the requests to send, until no answer was interrupted.

        Raises:
            InvalidRequest: an answer was interrupted too often.
        """
        for _ in range(1 + MAX_STOPS):
            if not self._open:
                return
            sent, self._open = self._open, []
            yield sent
        if self._open:
            problem = f"was interrupted more than {MAX_STOPS} times"
            raise InvalidRequest(field="data", problem=problem, allowed="fewer interruptions")

    def take(self, answer: Generation) -> tuple[int, Generation] | None:
        """Return the number of the request with its complete answer, or None if it must be continued.

        Raises:
            RequestError: the request failed.
        """
        if answer.error is not None:
            raise answer.error
        number = self._numbers[answer.request_id]
        whole = self._parts[number].joined(answer) if number in self._parts else answer
        if whole.finish_reason is not FinishReason.ABORT:
            return number, whole
        rest = whole.request.continuing(whole, inexact="continue")
        self._parts[number], self._numbers[rest.request_id] = whole, number
        self._open.append(rest)
        return None


def row_dtype(num_experts: int) -> str:
    """Return NeMo-RL's dtype of expert ids for a model: the smallest signed one that holds the ids and -1."""
    return next((dtype for dtype, most in ROW_DTYPES if num_experts <= most), "int32")


def length_before_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Decode) -> int:
    """Return how many tokens a generation has with stop strings: up to the token that completes the first of them."""

    def is_stopped(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(stop in text for stop in stops)

    first, last = 0, len(token_ids)
    if not stops or not is_stopped(last):
        return last
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if is_stopped(middle) else (middle + 1, last)
    return last


def batch_of(
    data: Mapping[str, Any],
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    *,
    pad: int,
    capabilities: Capabilities,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """Return NeMo-RL's tensors of generations. S is the length of the longest sequence of prompt and generation.

    Returns:
        `output_ids` in the dtype of `input_ids` [batch, S], `generation_lengths` and `unpadded_sequence_lengths` int64
        [batch], `logprobs` float32 [batch, S], 0 at prompts and padding, `truncated` bool [batch], `weight_versions`
        int32 [batch, S], -1 at prompts and padding. For a model with experts also `routed_experts` [batch, S,
        num_layers, top_k]. The last token of a sequence has not been through the model: it and the padding have the
        first experts, as with NeMo-RL's own workers.

    Raises:
        InvalidRequest: a generation lacks log probabilities or rows of its positions.
    """
    import torch

    routing = capabilities.routed_experts
    counts = [
        length_before_stop(generation.token_ids.tolist(), prompt.stop_strings, decode)
        if decode
        else len(generation.token_ids)
        for prompt, generation in zip(prompts, generations, strict=True)
    ]
    totals = [len(prompt.token_ids) + count for prompt, count in zip(prompts, counts, strict=True)]
    size, length = len(prompts), max(totals, default=0)
    ids = np.full((size, length), pad, np.int64)
    logprobs = np.zeros((size, length), np.float32)
    versions = np.full((size, length), NOT_SAMPLED, np.int32)
    rows = None
    if routing is not None:
        dtype = row_dtype(routing.num_experts)
        rows = np.empty((size, length, routing.num_layers, routing.top_k), dtype)
        rows[:] = np.arange(routing.top_k)
    for number, (prompt, generation, count) in enumerate(zip(prompts, generations, counts, strict=True)):
        begin, end = len(prompt.token_ids), totals[number]
        if generation.logprobs is None:
            raise InvalidRequest(field="logprobs", problem="are missing", allowed="one for each sampled token")
        ids[number, :begin] = prompt.token_ids
        ids[number, begin:end] = generation.token_ids[:count]
        logprobs[number, begin:end] = generation.logprobs[:count]
        versions[number, begin:end] = generation.weight_versions[:count]
        if rows is not None and routing is not None:
            needed = expected_rows(begin, 0, len(generation.token_ids))
            found = generation.routed_experts
            if generation.start or found is None or found.shape != (needed, routing.num_layers, routing.top_k):
                has = "are missing" if found is None else f"have the shape {found.shape} from {generation.start} on"
                allowed = f"({needed}, {routing.num_layers}, {routing.top_k}) from 0 on"
                raise InvalidRequest(field="routed_experts", problem=has, allowed=allowed)
            rows[number, : end - 1] = convert_rows(found, dtype, routing.num_experts - 1)[: end - 1]
    batch: dict[str, Any] = {
        "output_ids": torch.from_numpy(ids).to(data["input_ids"].dtype),
        "logprobs": torch.from_numpy(logprobs),
        "generation_lengths": torch.tensor(counts, dtype=torch.long),
        "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.long),
        "truncated": torch.tensor(
            [
                generation.finish_reason is FinishReason.LENGTH and count == len(generation.token_ids)
                for generation, count in zip(generations, counts, strict=True)
            ],
            dtype=torch.bool,
        ),
        "weight_versions": torch.from_numpy(versions),
    }
    if rows is not None:
        batch["routed_experts"] = torch.from_numpy(rows)
    return batch
