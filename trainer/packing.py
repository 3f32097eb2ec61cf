"""Packs samples into micro-batches: one row of tensors each, without padding between samples.

A sequence of S tokens has S - 1 predictions: position p reads token p and predicts token p + 1. All tensors of a
micro-batch are aligned to predictions. Each prediction has its input, its target and its row of routed experts. The
last token of a sample is only a target, so no prediction crosses from one sample into the next.
"""

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..schemas.rows import Rows
from .errors import PackError, check_integer
from .stitching import NOT_SAMPLED, Sample, check_samples

NO_EXPERT = -1
"""Value in `routed_experts` at positions without a row. No expert has this id."""
PADDING = -1
"""Value in `sample_indices` at positions without a sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MicroBatch:
    """T predictions of n samples in sequence, with padding at the end. All tensors are writable."""

    input_ids: torch.Tensor
    """i64[1, T]: input tokens; 0 in padding."""
    target_ids: torch.Tensor
    """i64[1, T]: the token after each input; 0 in padding."""
    position_ids: torch.Tensor
    """i64[1, T]: positions from 0 in each sample and in padding."""
    loss_mask: torch.Tensor
    """bool[1, T]: True if the target was sampled and is trained; False in padding."""
    advantages: torch.Tensor
    """f32[1, T]: advantage of the target; 0.0 in padding."""
    sampler_logprobs: torch.Tensor
    """f32[1, T]: log probability of the target from the sampler, possibly -inf; 0.0 where the loss mask is off."""
    weight_versions: torch.Tensor
    """i32[1, T]: version of the weights that sampled the target; -1 if it was not sampled, and in padding."""
    routed_experts: torch.Tensor | None
    """i16|i32[1, T, L, K]: experts of the input; NO_EXPERT (-1) where there is no row, which happens only where the
    loss mask is off. None if the samples have no routed experts."""
    sample_indices: torch.Tensor
    """i32[1, T]: index of the sample in the argument of `pack`; -1 in padding."""
    cu_seqlens: torch.Tensor
    """i32[n + 1]: first position of each sample, and T. Padding is one more segment at the end, which gives i32[n +
    2]."""

    def model_inputs(self) -> dict[str, torch.Tensor | bool]:
        """Return the arguments for a Hugging Face model: `model(**batch.model_inputs()).logits` is [1, T, vocabulary].

        The arguments contain no attention mask and disable the cache. Under these two conditions most transformers
        models find the sample boundaries in `position_ids` and keep attention within each sample. `check_packing`
        checks this for a model. With the default, `use_cache=True`, no model does: each sample then attends to the
        samples before it, without an error or a warning.
        """
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        """Return this micro-batch with its tensors on `device`."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **moved)

    def __repr__(self) -> str:
        """Return one line with sizes, without contents."""
        experts = self.routed_experts
        rows = "none" if experts is None else f"{experts.dtype} {'x'.join(map(str, experts.shape))}"
        segments = len(self.cu_seqlens) - 1
        return f"<MicroBatch predictions={self.input_ids.shape[1]} segments={segments} rows={rows}>"

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def pack(
    samples: Iterable[Sample],
    *,
    max_tokens: int,
    max_samples: int | None = None,
    pad_to_multiple_of: int = 1,
    too_long: Literal["refuse", "truncate"] = "refuse",
    without_routing: Literal["refuse", "separate"] = "refuse",
) -> list[MicroBatch]:
    """Pack samples into micro-batches with the best-fit decreasing heuristic. The same samples give the same batches.

    The tensors are in CPU memory, also if torch has another default device. `MicroBatch.to` moves a batch.

    Args:
        samples: samples with at least 2 tokens.
        max_tokens: maximum number of predictions in a micro-batch, a multiple of `pad_to_multiple_of`.
        max_samples: maximum number of samples in a micro-batch. None (default): no limit. Use 1 for a model in which
            the samples of one row affect each other, such as a model with linear attention or another recurrent state.
        pad_to_multiple_of: T is padded to a multiple of this number (default: 1).
        too_long: handling of a sample with more than `max_tokens` predictions. `refuse` (default): raise an error.
            `truncate`: keep the first predictions, of which possibly none is trained.
        without_routing: handling of samples without routed experts if other samples have them. `refuse` (default):
            raise an error. `separate`: put them into batches of their own, after the others. A sample without trained
            tokens needs no routed experts and may go into any batch.

    Returns:
        The micro-batches. Expert ids are i16 in all batches if all samples have u1, and i32 if any sample has u2.

    Raises:
        PackError: a sample cannot be packed. The message gives its index, the position and the reason.
    """
    listed = check_samples(samples)
    _check_options(max_tokens, max_samples, pad_to_multiple_of, too_long, without_routing)
    sizes = [_num_predictions(i, sample, max_tokens, too_long) for i, sample in enumerate(listed)]
    layout = _layout(listed)
    routed, unrouted = list(range(len(listed))), []
    if layout is not None:
        unrouted = [i for i, sample in enumerate(listed) if sample.routed_experts is None and sample.loss_mask.any()]
        if unrouted and without_routing == "refuse":
            raise PackError(
                f"sample {unrouted[0]} has no routed experts, and others have them; allowed: routed experts in all"
                ' samples, or without_routing="separate"'
            )
        apart = set(unrouted)
        routed = [i for i in routed if i not in apart]
    batches = []
    for members, experts in ((routed, layout), (unrouted, None)):
        for chosen in fit([sizes[i] for i in members], max_tokens, max_samples):
            indices = [members[i] for i in chosen]
            batch = _Filler(sum(sizes[i] for i in indices), pad_to_multiple_of, experts)
            for index in indices:
                batch.append(index, listed[index], sizes[index])
            batches.append(batch.finish())
    return batches


def fit(sizes: Sequence[int], capacity: int, max_items: int | None = None) -> list[list[int]]:
    """Put items into bins with the best-fit decreasing heuristic.

    From the largest item to the smallest, each item goes into the fullest bin with enough room, or into a new bin.
    Among equal candidates, the lower index and the older bin come first, so the same sizes always give the same bins.

    Args:
        sizes: size of each item, 0 to `capacity`.
        capacity: maximum sum of the sizes in a bin.
        max_items: maximum number of items in a bin, at least 1. None: no limit.

    Returns:
        For each bin, oldest first, the indices of its items in ascending order.

    Raises:
        ValueError: an item fits into no bin.
    """
    bins: list[list[int]] = []
    # Heaps of (room, bin): bins with room for the present item, least room first, and the others, most room first.
    # Sizes only decrease, so an open bin stays open until an item goes into it. Each item moves one bin once.
    open_bins: list[tuple[int, int]] = []
    full_bins: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        size = sizes[index]
        if not 0 <= size <= capacity:
            raise ValueError(f"item {index} is of size {size}; allowed: 0 to {capacity}")
        while full_bins and -full_bins[0][0] >= size:
            room, bin_index = heapq.heappop(full_bins)
            heapq.heappush(open_bins, (-room, bin_index))
        if open_bins:
            room, bin_index = heapq.heappop(open_bins)
        else:
            room, bin_index = capacity, len(bins)
            bins.append([])
        bins[bin_index].append(index)
        if len(bins[bin_index]) != max_items:
            heapq.heappush(full_bins, (size - room, bin_index))
    for members in bins:
        members.sort()
    return bins


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layers, top-k and dtype of the routed experts of all samples."""

    num_layers: int
    top_k: int
    dtype: torch.dtype

    def empty(self, num_rows: int) -> torch.Tensor:
        return torch.empty((1, num_rows, self.num_layers, self.top_k), dtype=self.dtype)


class _Filler:
    """A micro-batch while samples are copied into it. Its arrays are views of the tensors' memory."""

    def __init__(self, num_predictions: int, multiple: int, layout: _Layout | None) -> None:
        padded = -(-num_predictions // multiple) * multiple
        self._used = 0
        self._ends = [0]
        # numpy writes into this memory, so it must not be on torch's default device.
        with torch.device("cpu"):
            self._batch = MicroBatch(
                input_ids=torch.zeros((1, padded), dtype=torch.int64),
                target_ids=torch.zeros((1, padded), dtype=torch.int64),
                position_ids=torch.empty((1, padded), dtype=torch.int64),
                loss_mask=torch.zeros((1, padded), dtype=torch.bool),
                advantages=torch.zeros((1, padded), dtype=torch.float32),
                sampler_logprobs=torch.zeros((1, padded), dtype=torch.float32),
                weight_versions=torch.full((1, padded), NOT_SAMPLED, dtype=torch.int32),
                routed_experts=None if layout is None else layout.empty(padded),
                sample_indices=torch.full((1, padded), PADDING, dtype=torch.int32),
                cu_seqlens=torch.empty(0, dtype=torch.int32),
            )

    def append(self, index: int, sample: Sample, size: int) -> None:
        """Copy the first `size` predictions of a sample."""
        batch, span = self._batch, slice(self._used, self._used + size)
        _view(batch.input_ids)[span] = sample.token_ids[:size]
        _view(batch.target_ids)[span] = sample.token_ids[1 : size + 1]
        _view(batch.position_ids)[span] = np.arange(size)
        mask = sample.loss_mask[1 : size + 1]
        _view(batch.loss_mask)[span] = mask
        advantage = sample.advantage
        _view(batch.advantages)[span] = advantage[1 : size + 1] if isinstance(advantage, np.ndarray) else advantage
        np.copyto(_view(batch.sampler_logprobs)[span], sample.logprobs[1 : size + 1], where=mask)
        _view(batch.weight_versions)[span] = sample.weight_versions[1 : size + 1]
        _view(batch.sample_indices)[span] = index
        if batch.routed_experts is not None:
            self._copy_rows(_view(batch.routed_experts)[span], index, sample)
        self._used += size
        self._ends.append(self._used)

    def finish(self) -> MicroBatch:
        """Fill the rest with padding, and return the micro-batch."""
        padded = self._batch.input_ids.shape[1]
        if self._used < padded:
            _view(self._batch.position_ids)[self._used :] = np.arange(padded - self._used)
            if self._batch.routed_experts is not None:
                _view(self._batch.routed_experts)[self._used :] = NO_EXPERT
            self._ends.append(padded)
        ends = torch.tensor(self._ends, dtype=torch.int32, device="cpu")
        return dataclasses.replace(self._batch, cu_seqlens=ends)

    def _copy_rows(self, target: npt.NDArray[Any], index: int, sample: Sample) -> None:
        size = len(target)
        rows = sample.routed_experts
        start = size if rows is None else min(sample.start, size)
        needed = sample.loss_mask[1 : start + 1]
        if needed.any():
            position = int(needed.argmax())
            raise PackError(
                f"sample {index}: no row for position {position}, whose prediction is trained; its rows begin at"
                f" {sample.start}; allowed: a loss mask that is off, or a start of at most {position}"
            )
        target[:start] = NO_EXPERT
        if rows is not None:
            target[start:] = rows[: size - start]


def _view(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor [1, T, ...] as an array [T, ...]."""
    array: npt.NDArray[Any] = tensor[0].numpy()
    return array


def _check_options(
    max_tokens: int, max_samples: int | None, multiple: int, too_long: str, without_routing: str
) -> None:
    if max_samples is not None:
        check_integer(PackError, "max_samples", max_samples, 1)
    check_integer(PackError, "pad_to_multiple_of", multiple, 1)
    if check_integer(PackError, "max_tokens", max_tokens, 1) % multiple:
        raise PackError(f"max_tokens is {max_tokens}; allowed: multiples of pad_to_multiple_of, {multiple}")
    if too_long not in ("refuse", "truncate"):
        raise PackError(f"too_long is {too_long!r}; allowed: refuse, truncate")
    if without_routing not in ("refuse", "separate"):
        raise PackError(f"without_routing is {without_routing!r}; allowed: refuse, separate")


def _num_predictions(index: int, sample: Sample, max_tokens: int, too_long: str) -> int:
    size = len(sample) - 1
    if size < 1:
        raise PackError(f"sample {index} has {len(sample)} tokens, which is no prediction; allowed: 2 and above")
    if size > max_tokens and too_long == "refuse":
        raise PackError(
            f"sample {index} has {len(sample)} tokens, which is {size} predictions (S - 1); allowed: max_tokens ="
            f' {max_tokens} of them, or too_long="truncate"'
        )
    return min(size, max_tokens)


def _layout(samples: Sequence[Sample]) -> _Layout | None:
    """Return the common layers and top-k of samples with routed experts, and a dtype for their ids and NO_EXPERT."""
    first: tuple[int, Rows] | None = None
    wide = False
    for index, sample in enumerate(samples):
        rows = sample.routed_experts
        if rows is None:
            continue
        if first is None:
            first = index, rows
        elif rows.shape[1:] != first[1].shape[1:]:
            raise PackError(
                f"sample {index} has {rows.shape[1]} layers of top-{rows.shape[2]}, and sample {first[0]}"
                f" {first[1].shape[1]} of top-{first[1].shape[2]}; allowed: one layout in all samples"
            )
        wide = wide or rows.dtype == np.uint16
    if first is None:
        return None
    return _Layout(first[1].shape[1], first[1].shape[2], torch.int32 if wide else torch.int16)


def segment_indices(cu_seqlens: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Return the index of the segment of each position.

    Args:
        cu_seqlens: i32[n + 1], as in `MicroBatch`.
        num_positions: T, the last entry of `cu_seqlens`. Reading it from the tensor would wait for the device.

    Returns:
        i64[T]: 0 to n - 1, on the device of `cu_seqlens`.
    """
    positions = torch.arange(num_positions, device=cu_seqlens.device)
    return torch.bucketize(positions, cu_seqlens[1:-1].to(positions.dtype), right=True)


def attention_mask(
    batch: MicroBatch, *, dtype: torch.dtype = torch.float32, sliding_window: int | None = None
) -> torch.Tensor:
    """Return a causal mask that separates samples, for models that do not separate them by `position_ids`.

    The mask has T * T entries. If possible, use `MicroBatch.model_inputs`, or kernels that take `cu_seqlens`.

    Args:
        batch: micro-batch with the sample boundaries in `cu_seqlens`.
        dtype: dtype of the model (default: float32). Eager and sdpa attention add the mask to the attention scores. A
            boolean mask would mask nothing: eager attention would add zeros and ones.
        sliding_window: number of positions that each position sees, including itself: `config.sliding_window` for
            layers with a window. transformers adds no window to a given mask. None (default): all earlier positions.

    Returns:
        f[1, 1, T, T]: 0.0 where position [.., .., i, j] lets i see j, else the lowest number of the dtype.

    Raises:
        PackError: `sliding_window` is not an integer of at least 1.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    seen = (segments[:, None] == segments[None, :]).tril_()
    if sliding_window is not None:
        seen = seen.triu_(1 - check_integer(PackError, "sliding_window", sliding_window, 1))
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)[None, None]


def check_packing(model: nn.Module, batch: MicroBatch, **inputs: Any) -> None:
    """Check that no sample of a micro-batch affects another in this model. Once before training is enough.

    The check computes the gradient of the last segment's logits with respect to the embedding of each position. It must
    be exactly zero for positions of other segments. This takes a forward pass, and a backward pass that does not change
    the gradients of parameters.

    Args:
        model: Hugging Face model, not wrapped or compiled. Reentrant gradient checkpointing does not permit such a
            backward pass: call `model.eval()` first.
        batch: micro-batch with at least two segments. Padding is a segment.
        inputs: arguments of the model besides `batch.model_inputs()`, such as `attention_mask`.

    Raises:
        PackError: samples affect each other, or there is only one segment.
    """
    num_positions = batch.input_ids.shape[1]
    segments = segment_indices(batch.cu_seqlens, num_positions)
    here = segments == len(batch.cu_seqlens) - 2
    if bool(here.all()):
        raise PackError("the micro-batch has one segment; allowed: two or more")
    embedded: list[Tensor] = []

    def on_embeddings(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()

    handle = model.get_input_embeddings().register_forward_hook(on_embeddings)  # type: ignore[operator]
    try:
        with torch.enable_grad():
            logits = model(**(batch.model_inputs() | inputs)).logits[0, here]
            (gradient,) = torch.autograd.grad(logits.float().square().sum(), embedded)
    finally:
        handle.remove()
    seen = gradient[0].ne(0).any(dim=-1) & ~here
    if bool(seen.any()):
        raise PackError(
            f"in a {type(model).__name__} the last segment sees {int(seen.sum())} positions of segments before it; "
            "allowed: a mask that the model uses (attention_mask), or pack(..., max_samples=1)"
        )
