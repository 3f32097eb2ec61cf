"""Samples become micro-batches: one row of tensors each, without padding between samples.

A sequence of S tokens is S - 1 predictions: position p sees token p and predicts token p + 1. Everything in a
micro-batch is aligned to predictions, so each has its input, its target, and its row of routed experts, and nothing
reaches from one sample into the next: the last token of a sample is a target only.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..schemas.rows import Rows
from .bins import fit
from .checks import check_integer
from .errors import PackError
from .sample import NOT_SAMPLED, Sample, check_samples

__all__ = ["NO_EXPERT", "PADDING", "MicroBatch", "pack"]

NO_EXPERT = -1
"""Stands in `routed_experts` where there is no row; no expert has this id."""
PADDING = -1
"""Stands in `sample_indices` where there is no sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MicroBatch:
    """T predictions of n samples, one after another, and padding at the end. All tensors are writable."""

    input_ids: torch.Tensor
    """i64[1, T]; 0 in padding."""
    target_ids: torch.Tensor
    """i64[1, T]: the token after each input; 0 in padding."""
    position_ids: torch.Tensor
    """i64[1, T]: from 0 in each sample, and from 0 in padding."""
    loss_mask: torch.Tensor
    """bool[1, T]: the target was sampled and is to be trained; off in padding."""
    advantages: torch.Tensor
    """f32[1, T]: the target's; 0.0 in padding."""
    sampler_logprobs: torch.Tensor
    """f32[1, T]: of the target, by the sampler, which may be -inf; 0.0 where the loss mask is off."""
    weight_versions: torch.Tensor
    """i32[1, T]: the weights that sampled the target; -1 where it was not sampled, and in padding."""
    routed_experts: torch.Tensor | None
    """i16|i32[1, T, L, K]: the experts of the input; NO_EXPERT (-1) where there is no row, which is only where the
    loss mask is off. None if its samples have no routing."""
    sample_indices: torch.Tensor
    """i32[1, T]: which of the samples given to `pack`; -1 in padding."""
    cu_seqlens: torch.Tensor
    """i32[n + 1]: where each sample begins, and T. Padding is one more segment at the end: then i32[n + 2]."""

    def model_inputs(self) -> dict[str, torch.Tensor | bool]:
        """What a Hugging Face model is called with: `model(**batch.model_inputs()).logits` is [1, T, vocabulary].

        There is no attention mask, and no cache: under these two conditions most models of transformers read from
        `position_ids` where samples begin, and keep attention within them; `check_packing` tells whether this one
        does. With the default, `use_cache=True`, none does, and every sample silently sees those before it.
        """
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        """The same on a device."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        return dataclasses.replace(self, **moved)

    def __repr__(self) -> str:
        """One line with sizes, no contents."""
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
    """Put samples into as few micro-batches as best-fit decreasing finds; the same samples give the same batches.

    The tensors are in the CPU's memory, whatever torch's default device: `MicroBatch.to` moves one when its turn comes.

    Args:
        samples: of 2 tokens or more.
        max_tokens: predictions in a micro-batch, a multiple of `pad_to_multiple_of`: no T is larger.
        max_samples: in a micro-batch; None for any number. 1 for a model in which samples of one row would see each
            other: one with linear attention or another recurrent state.
        pad_to_multiple_of: T is a multiple of this.
        too_long: what becomes of a sample of more than `max_tokens` predictions; `truncate` keeps its first ones,
            among which there may be none that is trained.
        without_routing: what becomes of samples without routing where others have it: an error, or batches of
            their own, after the others. A sample with nothing to train needs no routing and may go with any.

    Returns:
        The micro-batches. Expert ids are i16 if all samples have u1, i32 if any has u2, in all of them alike.

    Raises:
        PackError: which sample cannot be packed, where, and why.
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
                f"sample {unrouted[0]} has no routing, and others have; allowed: routing in all samples, or"
                ' without_routing="separate"'
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the routing of all samples has in common."""

    num_layers: int
    top_k: int
    dtype: torch.dtype

    def empty(self, num_rows: int) -> torch.Tensor:
        return torch.empty((1, num_rows, self.num_layers, self.top_k), dtype=self.dtype)


class _Filler:
    """A micro-batch while its samples are copied in. Its arrays are views of its tensors' memory."""

    def __init__(self, num_predictions: int, multiple: int, layout: _Layout | None) -> None:
        padded = -(-num_predictions // multiple) * multiple
        self._used = 0
        self._ends = [0]
        # numpy writes into this memory, which a default device of the trainer's would put elsewhere.
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
        """Copy in the first `size` predictions of a sample."""
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
        """Fill what is left with padding."""
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
    """The memory of a tensor [1, T, ...] as an array [T, ...]."""
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
    """Layers and top_k that all samples with routing share, and the dtype that holds their ids and NO_EXPERT."""
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
