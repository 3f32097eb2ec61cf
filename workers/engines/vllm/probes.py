"""The expected output of a module, computed from its weights, and the tolerance for rounding. Uses torch, not vLLM.

A probe has a fixed input of a few rows, the output that the weights of a checkpoint give for it, and a tolerance for
each number of that output. The reference is computed in float32, or in float64 if the weights are float32.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

SEED = 20_260
NUM_COLUMNS = 6
"""Number of columns of a linear module's weight that are compared exactly."""
NUM_DENSE = 2
"""Number of input rows that use every weight of a linear module."""
NUM_IDS = 16
"""Number of compared rows of an embedding."""
NUM_SIGMAS = 8.0
"""Limit for a sum of independent roundings, in standard deviations. One sum in 10^15 exceeds it."""
SMALLEST = 1e-37
"""Kernels may replace smaller numbers by zero, including each product of a sum."""
CHUNK_ELEMENTS = 1 << 24
"""Number of elements of a weight that are converted at a time: at most 128 MiB."""
CPU_CHUNK_ELEMENTS = 1 << 20
"""The same on a CPU. About as many elements fit into its cache, which halves the time."""
STEEPEST = 1.2
"""Upper limit for the slope of all these activations."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleProbe:
    """An input, and the expected output of the weights for it."""

    inputs: Tensor
    expected: Tensor
    """Expected output in float32 or float64, on the CPU."""
    tolerance: Tensor
    """Largest allowed difference of each number from the expected number."""
    num_plain: int = 0
    """Number of first rows to which the module does not add its bias."""

    def difference(self, actual: Tensor) -> str | None:
        """Return a description of how `actual` differs from the expected output; None: it does not differ."""
        actual = actual.detach().to("cpu", self.expected.dtype).reshape(-1, actual.shape[-1])
        if actual.shape != self.expected.shape:
            return f"has the shape {tuple(actual.shape)} instead of {tuple(self.expected.shape)}"
        # Weights that are not finite give outputs that are not finite. Then only their positions are compared.
        is_wrong = ~((actual - self.expected).abs() <= self.tolerance)
        is_wrong &= ~(~actual.isfinite() & ~self.expected.isfinite())
        if not is_wrong.any():
            return None
        worst = float((actual - self.expected).abs().nan_to_num(nan=math.inf).max())
        largest = float(self.expected.abs().nan_to_num(nan=math.inf).max())
        return f"differs in {int(is_wrong.sum())} of {is_wrong.numel()} numbers, by up to {worst:.2g} of {largest:.2g}"


def linear_probe(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, step: float = 0.0) -> ModuleProbe:
    """Return the probe of a module that computes `x @ weight.T + bias`.

    If an input row has a single 1, the module returns one column of its weight. No rounding occurs, so these rows are
    compared exactly. They detect even weights of the previous optimizer step. The other rows use every weight. Their
    tolerance follows from the roundings of a kernel, which are treated as independent of each other.

    Args:
        weight: `[out, in]`.
        dtype: dtype of the module's inputs and outputs.
        step: relative error of each product in addition to the rounding of `dtype`.
    """
    num_in = weight.shape[1]
    columns = _spread(num_in, NUM_COLUMNS)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.zeros(len(columns) + NUM_DENSE, num_in)
    inputs[torch.arange(len(columns)), columns] = 1
    # Inputs of 1 and -1, because kernels that round their inputs to few bits do not change them.
    inputs[len(columns)] = torch.randint(2, (num_in,), generator=generator) * 2.0 - 1
    inputs[len(columns) + 1 :] = torch.randn(NUM_DENSE - 1, num_in, generator=generator)
    inputs = inputs.to(weight.device, dtype)
    wide = _wide(weight.dtype if weight.is_floating_point() else dtype)
    dense, norms = _matmul(inputs[len(columns) :], weight, wide)
    if bias is not None:
        dense += bias.to("cpu", wide)
    expected = torch.cat((weight[:, columns.to(weight.device)].T.to("cpu", wide), dense))
    unit = _unit(dtype)
    tolerance = expected.abs() * unit + NUM_SIGMAS * (_accumulation(dtype, num_in) + step) * norms + num_in * SMALLEST
    tolerance[: len(columns)] = expected[: len(columns)].abs() * (_exact_unit(dtype) + step) + SMALLEST
    return ModuleProbe(inputs, expected, tolerance, len(columns))


def embedding_probe(weight: Tensor, num_rows: int) -> ModuleProbe:
    """Return the probe of a module that looks up rows of `weight`. Only its first `num_rows` rows are in use."""
    ids = _spread(num_rows, NUM_IDS)
    expected = weight[ids.to(weight.device)].to("cpu", torch.float64)
    return ModuleProbe(ids.to(weight.device), expected, torch.zeros_like(expected))


def head_probes(maps: Tensor, dtype: torch.dtype) -> ModuleProbe:
    """Return the probe of a module that multiplies each head's vector by its own matrix, `maps[head, in, out]`.

    Inputs are `[head, row, in]`, outputs are `[head * row, out]`. No kernel has rounded the matrices.
    """
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(maps.shape[0], NUM_DENSE, maps.shape[1], generator=generator, dtype=torch.float64)
    wide = maps.to("cpu", torch.float64)
    expected = torch.bmm(inputs, wide).flatten(0, 1)
    tolerance = NUM_SIGMAS * _exact_unit(dtype) * wide.norm(dim=1).repeat_interleave(NUM_DENSE, 0)
    return ModuleProbe(inputs, expected, tolerance)


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """The operations of an expert between its two matrix products."""

    split: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Splits the first product into gate and up."""
    apply: Callable[[Tensor], Tensor]
    """The function that is applied to the gate."""
    offset: float = 0.0
    """Number that is added to up."""
    limit: float = math.inf
    """Upper limit of the gate, and limit of the absolute value of up."""


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[: len(x) // 2], x[len(x) // 2 :]


ACTIVATIONS = {
    "silu": Activation(_halves, torch.nn.functional.silu),
    "gelu": Activation(_halves, torch.nn.functional.gelu),
    "gelu_tanh": Activation(_halves, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
    "swigluoai": Activation(
        lambda x: (x[::2], x[1::2]), lambda gate: gate * torch.sigmoid(1.702 * gate), offset=1.0, limit=7.0
    ),
}
"""Supported activations, by vLLM's names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The weights of gated experts."""

    w13: Tensor
    """`[expert, 2 * inner, hidden]`."""
    w2: Tensor
    """`[expert, hidden, inner]`."""
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: Activation


def experts_routing(num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return expert ids and weights `[rows, top_k]` that use each expert."""
    num_rows = math.ceil(num_experts / top_k)
    ids = torch.arange(num_rows * top_k).reshape(num_rows, top_k) % num_experts
    weights = torch.arange(1, top_k + 1, dtype=torch.float32) / (top_k * (top_k + 1) / 2)
    return ids, weights.expand(num_rows, top_k).contiguous()


def experts_probe(experts: Experts, top_k: int, dtype: torch.dtype, *, step: float = 0.0) -> ModuleProbe:
    """Return the probe of experts, whose rows are routed by `experts_routing`.

    Args:
        dtype, step: as for `linear_probe`.
    """
    w13, w2, activation = experts.w13, experts.w2, experts.activation
    ids, weights = experts_routing(len(w13), top_k)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(len(ids), w13.shape[2], generator=generator).to(w13.device, dtype)
    wide = _wide(w13.dtype)
    expected = torch.zeros(len(ids), w2.shape[1], dtype=wide, device=w2.device)
    variance = torch.zeros_like(expected)
    unit = _unit(dtype)
    inner_unit = unit + _accumulation(dtype, w13.shape[2]) + step
    outer_unit = unit + _accumulation(dtype, w2.shape[2]) + step
    for row in range(len(ids)):
        x = inputs[row].to(wide)
        for expert, share in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            first = w13[expert].to(wide)
            product, noise = first @ x, first.norm(dim=1) * inner_unit
            if experts.w13_bias is not None:
                product = product + experts.w13_bias[expert].to(wide)
                noise = noise + product.abs() * unit
            (gate, up), (gate_noise, up_noise) = activation.split(product), activation.split(noise)
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
            up, acted = up + activation.offset, activation.apply(gate)
            hidden = acted * up
            hidden_noise = STEEPEST * gate_noise * up.abs() + acted.abs() * up_noise + 2 * unit * hidden.abs()
            second = w2[expert].to(wide)
            output = second @ hidden
            noise_of_output = (second.square() @ hidden_noise.square()).sqrt()
            noise_of_output += outer_unit * (second.square() @ hidden.square()).sqrt()
            if experts.w2_bias is not None:
                output = output + experts.w2_bias[expert].to(wide)
                noise_of_output += output.abs() * unit
            expected[row] += share * output
            variance[row] += (share * (noise_of_output + output.abs() * unit)).square()
    tolerance = NUM_SIGMAS * variance.sqrt() + 2 * unit * expected.abs() + w2.shape[2] * SMALLEST
    return ModuleProbe(inputs, expected.cpu(), tolerance.cpu())


def plain_difference(actual: Tensor, raw: Tensor) -> str | None:
    """Return a description of how a parameter differs from its loaded tensor `raw`; None: no number differs."""
    if actual.shape != raw.shape:
        return f"has the shape {tuple(actual.shape)} instead of {tuple(raw.shape)}"
    raw = raw.to(actual.device, actual.dtype)
    is_same = (actual == raw) | (actual.isnan() & raw.isnan()) if raw.is_floating_point() else actual == raw
    if bool(is_same.all()):
        return None
    return f"differs in {int((~is_same).sum())} of {is_same.numel()} numbers"


def _matmul(inputs: Tensor, weight: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `inputs @ weight.T` and the norms of the weight's rows."""
    products, norms = [], []
    rows = max(1, (CHUNK_ELEMENTS if weight.is_cuda else CPU_CHUNK_ELEMENTS) // weight.shape[1])
    for start in range(0, len(weight), rows):
        wide_part = weight[start : start + rows].to(wide)
        products.append((inputs.to(wide) @ wide_part.T).cpu())
        norms.append(wide_part.norm(dim=1).cpu())
    return torch.cat(products, 1), torch.cat(norms)


def _spread(length: int, count: int) -> Tensor:
    """Return `count` indices below `length`, including the first and the last; all indices if there are fewer."""
    return torch.tensor(sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)}))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of a number that is rounded to `dtype`."""
    return torch.finfo(dtype).eps


def _exact_unit(dtype: torch.dtype) -> float:
    """Return the relative tolerance for numbers without rounding.

    For 16-bit types it is less than the distance to the next number, so each bit must be right. For float32 it allows
    errors in the last bits.
    """
    return torch.finfo(dtype).eps * (4 if dtype is torch.float32 else 0.25)


def _accumulation(dtype: torch.dtype, length: int) -> float:
    """Return the relative error of a sum of `length` products, as an error of each product.

    Kernels add in float32 or a wider type. Kernels for 16-bit types may round partial sums to 16 bits.
    """
    return torch.finfo(dtype).eps if dtype is not torch.float32 else torch.finfo(dtype).eps * math.sqrt(length)
