"""What a module with certain weights has to compute, and how far from it rounding may lead: torch only, no vLLM.

A probe is a fixed input of a few rows, the output that the weights of a checkpoint give for it, and a tolerance for
each number of that output. The reference is computed in float32, or in float64 where the weights are float32.

A row of a linear module's input that has a single 1 makes the module give one column of its weight. No rounding is
involved, so these rows are compared exactly: they show also the weights of the optimizer step before. The other rows
use every weight. Their tolerance follows from the roundings that a kernel may make, taken as independent of each other.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "ACTIVATIONS",
    "Experts",
    "ModuleProbe",
    "embedding_probe",
    "experts_probe",
    "experts_routing",
    "head_probes",
    "linear_probe",
    "plain_difference",
]

SEED = 20_260
NUM_COLUMNS = 6
"""Of a linear module's weight that are compared exactly."""
NUM_DENSE = 2
"""Rows that use every weight of a linear module."""
NUM_IDS = 16
"""Rows of an embedding that are compared."""
NUM_SIGMAS = 8.0
"""Roundings that are independent of each other add up to this many standard deviations at most: one in 10^15 goes
beyond."""
SMALLEST = 1e-37
"""Kernels may take numbers below for zero, also each product of a sum."""
CHUNK_ELEMENTS = 1 << 24
"""Of a weight that are converted at a time: at most 128 MiB."""
CPU_CHUNK_ELEMENTS = 1 << 20
"""The same on a CPU, whose cache holds about as much: half the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleProbe:
    """An input, and the output that the weights give for it."""

    inputs: Tensor
    expected: Tensor
    """float32 or float64, on the CPU."""
    tolerance: Tensor
    """How far each number may be from it."""
    num_plain: int = 0
    """The first rows, to which the module does not add its bias."""

    def difference(self, actual: Tensor) -> str | None:
        """Return how `actual` differs from what is expected; None: it does not."""
        actual = actual.detach().to("cpu", self.expected.dtype).reshape(-1, actual.shape[-1])
        if actual.shape != self.expected.shape:
            return f"has the shape {tuple(actual.shape)} instead of {tuple(self.expected.shape)}"
        # Weights that are not finite give outputs that are not; then only where they are counts.
        is_wrong = ~((actual - self.expected).abs() <= self.tolerance)
        is_wrong &= ~(~actual.isfinite() & ~self.expected.isfinite())
        if not is_wrong.any():
            return None
        worst = float((actual - self.expected).abs().nan_to_num(nan=math.inf).max())
        largest = float(self.expected.abs().nan_to_num(nan=math.inf).max())
        return f"differs in {int(is_wrong.sum())} of {is_wrong.numel()} numbers, by up to {worst:.2g} of {largest:.2g}"


def linear_probe(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, step: float = 0.0) -> ModuleProbe:
    """Return the probe of a module that computes `x @ weight.T + bias`.

    Args:
        weight: `[out, in]`.
        dtype: of the module's inputs and outputs.
        step: relative error of each product beyond those of `dtype`.
    """
    num_in = weight.shape[1]
    columns = _spread(num_in, NUM_COLUMNS)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.zeros(len(columns) + NUM_DENSE, num_in)
    inputs[torch.arange(len(columns)), columns] = 1
    # Of size 1, as kernels that round their inputs to few bits keep these as they are.
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
    """Return the probe of a module that looks up rows of `weight`, of which the first `num_rows` are in use."""
    ids = _spread(num_rows, NUM_IDS)
    expected = weight[ids.to(weight.device)].to("cpu", torch.float64)
    return ModuleProbe(ids.to(weight.device), expected, torch.zeros_like(expected))


def head_probes(maps: Tensor, dtype: torch.dtype) -> ModuleProbe:
    """Return the probe of a module that multiplies each head's vector by its own matrix, `maps[head, in, out]`.

    Inputs and outputs are `[head * row, ...]`; no kernel has rounded the matrices.
    """
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(maps.shape[0], NUM_DENSE, maps.shape[1], generator=generator, dtype=torch.float64)
    wide = maps.to("cpu", torch.float64)
    expected = torch.bmm(inputs, wide).flatten(0, 1)
    tolerance = NUM_SIGMAS * _exact_unit(dtype) * wide.norm(dim=1).repeat_interleave(NUM_DENSE, 0)
    return ModuleProbe(inputs, expected, tolerance)


def experts_routing(num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return ids and weights `[rows, top_k]` that use each expert."""
    num_rows = math.ceil(num_experts / top_k)
    ids = torch.arange(num_rows * top_k).reshape(num_rows, top_k) % num_experts
    weights = torch.arange(1, top_k + 1, dtype=torch.float32) / (top_k * (top_k + 1) / 2)
    return ids, weights.expand(num_rows, top_k).contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """What experts do between their two products."""

    split: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The first product into gate and up."""
    apply: Callable[[Tensor], Tensor]
    """To the gate."""
    offset: float = 0.0
    """Is added to up."""
    limit: float = math.inf
    """Bounds the gate from above, and up on both sides."""


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
"""Those that are known here, by vLLM's names."""
STEEPEST = 1.2
"""No activation above is steeper."""


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


def experts_probe(experts: Experts, top_k: int, dtype: torch.dtype, *, step: float = 0.0) -> ModuleProbe:
    """Return the probe of experts, whose rows are routed by `experts_routing`; the rest as of `linear_probe`."""
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
    """Return how a parameter differs from the tensor `raw` that was loaded into it; None: not in a single bit."""
    if actual.shape != raw.shape:
        return f"has the shape {tuple(actual.shape)} instead of {tuple(raw.shape)}"
    raw = raw.to(actual.device, actual.dtype)
    is_same = (actual == raw) | (actual.isnan() & raw.isnan()) if raw.is_floating_point() else actual == raw
    if bool(is_same.all()):
        return None
    return f"differs in {int((~is_same).sum())} of {is_same.numel()} numbers"


def _matmul(inputs: Tensor, weight: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `inputs @ weight.T`, and the norms of the weight's rows."""
    products, norms = [], []
    rows = max(1, (CHUNK_ELEMENTS if weight.is_cuda else CPU_CHUNK_ELEMENTS) // weight.shape[1])
    for start in range(0, len(weight), rows):
        wide_part = weight[start : start + rows].to(wide)
        products.append((inputs.to(wide) @ wide_part.T).cpu())
        norms.append(wide_part.norm(dim=1).cpu())
    return torch.cat(products, 1), torch.cat(norms)


def _spread(length: int, count: int) -> Tensor:
    """Return `count` indices below `length`, or all: the first, the last and some between."""
    return torch.tensor(sorted({round(i * (length - 1) / max(count - 1, 1)) for i in range(count)}))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _unit(dtype: torch.dtype) -> float:
    """Relative error of a number that is rounded to `dtype`, at most."""
    return torch.finfo(dtype).eps


def _exact_unit(dtype: torch.dtype) -> float:
    """Less than the distance to the next number: of 16 bits each must be right, of float32 the last one may be lost."""
    return torch.finfo(dtype).eps * (4 if dtype is torch.float32 else 0.25)


def _accumulation(dtype: torch.dtype, length: int) -> float:
    """Relative error of each of `length` products that are added up, as if all errors were its own.

    Kernels add up in float32 at least; those for 16 bits may round parts of the sum to 16 bits.
    """
    return torch.finfo(dtype).eps if dtype is not torch.float32 else torch.finfo(dtype).eps * math.sqrt(length)
