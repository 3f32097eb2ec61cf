"""The expected output of a module, computed from its weights, and the tolerance for rounding. Uses torch, not vLLM.

An expectation is a pair of an expected output and the largest allowed difference of each of its numbers, on the CPU.
Inputs and references have the dtype of the weights: a kernel computes with it too.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SEED = 20_260
NUM_COLUMNS = 6
"""Number of columns of a linear module's weight that are compared exactly."""
NUM_SIGMAS = 8.0
"""Limit for a sum of independent roundings, in standard deviations. One sum in 10^15 exceeds it."""
EXPERT_SIGMAS = 16.0
"""The same for an expert, whose roundings pass through two products and an activation with a slope up to 1.2."""
PART_ELEMENTS = 1 << 20
"""Number of elements of a weight that are converted at a time: about as many as fit into a cache."""
SMALLEST = 1e-37
"""Kernels may replace smaller numbers by zero, including each product of a sum."""


class Expectation(NamedTuple):
    """The output of a module for some inputs, in float32 or float64."""

    output: Tensor
    tolerance: Tensor
    """Largest allowed difference of each number."""

    def difference(self, actual: Tensor) -> str:
        """Return a description of how `actual` differs; an empty string if it does not."""
        return difference(actual.reshape(-1, actual.shape[-1]), *self)


def difference(actual: Tensor, expected: Tensor, tolerance: Tensor | None = None) -> str:
    """Return a description of how `actual` differs from `expected`; an empty string if it does not.

    Args:
        actual, expected: tensors.
        tolerance: largest allowed difference of each number. None: both tensors must be equal in the dtype of `actual`.
    """
    if actual.shape != expected.shape:
        return f"has the shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if tolerance is None:
        expected = expected.to(actual.device, actual.dtype)
        is_right = actual == expected
        if actual.is_floating_point():
            is_right |= actual.isnan() & expected.isnan()
        size = ""
    else:
        actual = actual.detach().to(expected.device, expected.dtype)
        # Weights that are not finite give outputs that are not finite. Then only their positions are compared.
        is_right = ((actual - expected).abs() <= tolerance) | (~actual.isfinite() & ~expected.isfinite())
        # A difference by rounding is small beside the numbers.
        worst, largest = (float(x.abs().nan_to_num(nan=math.inf).max()) for x in (actual - expected, expected))
        size = f", by up to {worst:.2g} of {largest:.2g}"
    num_wrong = is_right.numel() - int(is_right.sum())
    return f"differs in {num_wrong} of {is_right.numel()} numbers{size}" if num_wrong else ""


def linear_inputs(weight: Tensor) -> Tensor:
    """Return inputs `[rows, in]` of a module with this weight `[out, in]`. Only its last row uses the bias.

    If an input row has a single 1, the module returns one column of its weight. No rounding occurs, so these rows are
    compared exactly, and detect even weights of the previous optimizer step. The last row uses every weight; its
    numbers are 1 and -1, because kernels that round their inputs to few bits do not change them.
    """
    num_in = weight.shape[1]
    signs = torch.randint(2, (1, num_in), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    rows = torch.cat((torch.nn.functional.one_hot(spread(num_in, NUM_COLUMNS), num_in), signs))
    return rows.to(weight.device, weight.dtype)


def expect_linear(weight: Tensor, bias: Tensor | None, *, step: float = 0.0) -> Expectation:
    """Return what a module must compute for `linear_inputs`.

    Args:
        weight, bias: weight `[out, in]` and bias `[out]`.
        step: relative error of each product in addition to the rounding of the dtype.
    """
    wide, unit = widen(weight.dtype), torch.finfo(weight.dtype).eps
    inputs = linear_inputs(weight)
    columns = weight[:, spread(weight.shape[1], NUM_COLUMNS).to(weight.device)].T.to("cpu", wide)
    dense = torch.nn.functional.linear(inputs[-1:], weight, None if bias is None else bias.to(weight)).to("cpu", wide)
    # By parts: the norm of a whole weight would make a copy of it in the wide type.
    parts = torch.split(weight, max(1, PART_ELEMENTS // weight.shape[1]))
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in parts]).cpu()
    # For 16-bit types this is less than the distance to the next number, so each bit of a column must be right. For
    # float32 it allows errors in the last bits.
    exact = columns.abs() * (unit * (4 if weight.dtype is torch.float32 else 0.25) + step) + SMALLEST
    # The reference is rounded once, as the output of the kernel is.
    rounded = 2 * unit * dense.abs() + NUM_SIGMAS * (sum_unit(weight.dtype, weight.shape[1]) + step) * norms
    return Expectation(torch.cat((columns, dense)), torch.cat((exact, rounded + weight.shape[1] * SMALLEST)))


class Activation(NamedTuple):
    """The operations of an expert between its two matrix products."""

    apply: Callable[[Tensor], Tensor]
    """The function that is applied to the gate."""
    is_interleaved: bool = False
    """True if gate and up are the even and the odd numbers of the first product, instead of its halves."""
    offset: float = 0.0
    """Number that is added to up."""
    limit: float = math.inf
    """Upper limit of the gate, and limit of the absolute value of up."""

    def join(self, x: Tensor) -> Tensor:
        """Return the input of the second product for the output `x` of the first."""
        gate, up = (x[::2], x[1::2]) if self.is_interleaved else x.chunk(2)
        return self.apply(gate.clamp(max=self.limit)) * (up.clamp(-self.limit, self.limit) + self.offset)


ACTIVATIONS = {
    "silu": Activation(torch.nn.functional.silu),
    "gelu": Activation(torch.nn.functional.gelu),
    "gelu_tanh": Activation(lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
    "swigluoai": Activation(lambda gate: gate * torch.sigmoid(1.702 * gate), True, 1.0, 7.0),
}
"""Supported activations, by vLLM's names."""


def expert_inputs(w13: Tensor) -> Tensor:
    """Return one input row for each expert of `w13`, `[expert, 2 * inner, hidden]`."""
    rows = torch.randn(w13.shape[0], w13.shape[2], generator=torch.Generator().manual_seed(SEED))
    return rows.to(w13.device, w13.dtype)


def route_experts(num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return expert ids and weights `[expert, top_k]`: only the first expert of each row has a weight above 0."""
    ids = (torch.arange(num_experts)[:, None] + torch.arange(top_k)) % num_experts
    weights = torch.zeros(num_experts, top_k)
    weights[:, 0] = 1
    return ids, weights


def expect_experts(
    weights: dict[str, Tensor], activate: Callable[[Tensor], Tensor], ids: Tensor, *, step: float = 0.0
) -> Expectation:
    """Return what gated experts must compute for `expert_inputs`, each row with the weight 1 for its first expert.

    Args:
        weights: `w13_weight` `[expert, 2 * inner, hidden]`, `w2_weight` `[expert, hidden, inner]`, and their biases
            `w13_bias` and `w2_bias`, if there are any.
        activate: operation between the two products.
        ids: ids of the experts of each row, from `route_experts`.
        step: relative error of each product in addition to the rounding of the dtype.
    """
    w13, w2 = weights["w13_weight"], weights["w2_weight"]
    wide, unit = widen(w13.dtype), torch.finfo(w13.dtype).eps
    unit += sum_unit(w13.dtype, max(w13.shape[2], w2.shape[2])) + step
    inputs = expert_inputs(w13)

    def compute(expert: int, x: Tensor) -> tuple[Tensor, Tensor]:
        product = w13[expert].to(wide) @ x.to(wide)
        if "w13_bias" in weights:
            product += weights["w13_bias"][expert].to(wide)
        hidden, second = activate(product), w2[expert].to(wide)
        # Each number is a sum of products of these sizes, and so is its rounding.
        sizes = second.norm(dim=1) * hidden.norm() / math.sqrt(len(hidden))
        output = second @ hidden
        if "w2_bias" in weights:
            output += weights["w2_bias"][expert].to(wide)
        return output.cpu(), (sizes + output.abs()).cpu()

    found = [compute(expert, x) for expert, x in enumerate(inputs)]
    outputs, scales = torch.stack([output for output, _ in found]), torch.stack([scale for _, scale in found])
    # A kernel multiplies the outputs of the other experts of a row by 0, which is not 0 if they are not finite.
    if not bool(outputs.isfinite().all()):
        for row, (_, *others) in enumerate(ids.tolist()):
            outputs[row] += sum(0 * compute(other, inputs[row])[0] for other in others)
    return Expectation(outputs, EXPERT_SIGMAS * unit * scales + w2.shape[2] * SMALLEST)


def expect_maps(maps: Tensor) -> Expectation:
    """Return the sums of the rows of matrices `[head, in, out]`, with random signs: no kernel has rounded copies."""
    signs = torch.randint(2, (maps.shape[1],), generator=torch.Generator().manual_seed(SEED)) * 2.0 - 1
    wide = maps.to("cpu", torch.float64)
    sums = torch.einsum("i,hio->ho", signs.double(), wide)
    return Expectation(sums, 1e-9 * wide.abs().sum(dim=1))


def spread(length: int, count: int) -> Tensor:
    """Return `count` indices below `length`, including the first and the last; all indices if there are fewer."""
    return torch.tensor(sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)}))


def widen(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of references for weights of `dtype`."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def sum_unit(dtype: torch.dtype, length: int) -> float:
    """Return the relative error of a sum of `length` products, as an error of each product.

    Kernels add in float32 or a wider type. Kernels for 16-bit types may round partial sums to 16 bits.
    """
    return torch.finfo(dtype).eps * (math.sqrt(length) if dtype is torch.float32 else 1)
