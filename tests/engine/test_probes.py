"""Probes distinguish right outputs from wrong ones: references and tolerances, without an engine."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow
"""These tests are slow, because torch takes seconds to import."""


def run_linear(weight: Any, bias: Any = None) -> Any:
    """Return the output of a linear module for the inputs of its probe."""
    import torch

    from rollbus.workers.engines.vllm.probes import linear_inputs

    inputs = linear_inputs(weight)
    return torch.cat([inputs[:-1] @ weight.T, torch.nn.functional.linear(inputs[-1:], weight, bias)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_linear_probe_allows_rounding_and_nothing_else(dtype: str) -> None:
    """A kernel of this dtype passes.

    A probe detects small changes in one column, two swapped rows, a changed row and a lost bias.
    """
    import torch

    from rollbus.workers.engines.vllm.probes import expect_linear

    kind = getattr(torch, dtype)
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(1)).to(kind)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2)).to(kind)
    probe = expect_linear(weight, bias)

    nudged, swapped, changed = weight.clone(), weight.clone(), weight.clone()
    nudged[:, 0] *= 1 + 16 * torch.finfo(kind).eps
    swapped[[3, 4]] = weight[[4, 3]]
    changed[7, 1:-1] = weight[8, 1:-1]
    wide = run_linear(weight.double(), bias.double())
    assert probe.difference(run_linear(weight, bias)) == ""
    assert probe.difference(wide.to(kind)) == ""
    for wrong in ((nudged, bias), (swapped, bias), (changed, bias), (weight, bias * 0)):
        assert "differs in" in probe.difference(run_linear(*wrong))


def test_nan_outputs_are_right_only_where_the_reference_has_nan() -> None:
    """A checkpoint full of NaN can be loaded: NaN outputs are right exactly where the reference has NaN."""
    import torch

    from rollbus.workers.engines.vllm.probes import expect_linear

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight[2] = float("nan")
    probe = expect_linear(weight, None)
    right = run_linear(weight)

    assert probe.difference(right) == ""
    assert probe.difference(right.nan_to_num()) != ""


def test_numbers_near_zero_may_become_zero() -> None:
    """A probe accepts zeros for denormal weights, as of a token that no text has: kernels flush them to zero."""
    import torch

    from rollbus.workers.engines.vllm.probes import expect_linear

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[3] = 1e-39
    flushed = torch.where(weight.abs() < 1e-38, torch.zeros_like(weight), weight)

    assert bool((weight[3] != 0).all())
    assert expect_linear(weight, None).difference(run_linear(flushed)) == ""


@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_probe_uses_each_expert(dtype: str, activation: str) -> None:
    """Experts computed in this dtype pass, and a probe detects the replacement of any expert, or of one row of it."""
    import torch

    from rollbus.workers.engines.vllm.probes import ACTIVATIONS, expect_experts, expert_inputs, route_experts

    kind, act = getattr(torch, dtype), ACTIVATIONS[activation]
    generator = torch.Generator().manual_seed(1)
    w13 = (torch.randn(5, 64, 128, generator=generator) * 0.1).to(kind)
    w2 = (torch.randn(5, 128, 32, generator=generator) * 0.1).to(kind)
    probe = expect_experts({"w13_weight": w13, "w2_weight": w2}, act)
    inputs, (ids, weights) = expert_inputs(w13), route_experts(5, 2)

    def compute(w2: torch.Tensor) -> torch.Tensor:
        rows = []
        for x, chosen, shares in zip(inputs, ids, weights, strict=True):
            row = torch.zeros(128)
            for expert, share in zip(chosen, shares, strict=True):
                row += share * (w2[expert] @ act(w13[expert] @ x)).float()
            rows.append(row)
        return torch.stack(rows)

    assert probe.difference(compute(w2)) == ""
    for expert in range(5):
        other = w2.clone()
        other[expert] = w2[(expert + 1) % 5]
        assert probe.difference(compute(other)) != ""
        other = w2.clone()
        other[expert, int(probe.output[expert].abs().argmax())] = 0
        assert probe.difference(compute(other)) != ""


def test_copies_of_a_projection_are_compared_exactly() -> None:
    """A change of one number of one head's matrix is found."""
    import torch

    from rollbus.workers.engines.vllm.probes import expect_maps

    maps = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    changed = maps.clone()
    changed[2, 63, 5] *= 1.01

    assert not torch.equal(changed, maps)
    assert expect_maps(maps).difference(expect_maps(maps.clone()).output) == ""
    assert expect_maps(maps).difference(expect_maps(changed).output) != ""
