"""Probes distinguish right outputs from wrong ones: references and tolerances, without an engine."""

import pytest

pytestmark = pytest.mark.slow
"""These tests are slow, because torch takes seconds to import."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_linear_probe_allows_rounding_and_nothing_else(dtype: str) -> None:
    """A kernel of this dtype passes.

    A probe detects small changes in one column, two swapped rows and a lost bias.
    """
    import torch

    from rollbus.workers.engines.vllm.probes import ModuleProbe, linear_probe

    kind = getattr(torch, dtype)
    weight = torch.randn(96, 512, generator=torch.Generator().manual_seed(1)).to(kind)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(2)).to(kind)
    probe = linear_probe(weight, bias, kind)

    def compute(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        plain, dense = probe.inputs[: probe.num_plain], probe.inputs[probe.num_plain :]
        return torch.cat([plain @ weight.T, dense @ weight.T + bias])

    nudged, swapped = weight.clone(), weight.clone()
    nudged[:, 0] *= 1 + 16 * torch.finfo(kind).eps
    swapped[[3, 4]] = weight[[4, 3]]
    assert isinstance(probe, ModuleProbe)
    assert probe.difference(compute(weight, bias)) is None
    assert "differs in" in str(probe.difference(compute(nudged, bias)))
    assert "differs in" in str(probe.difference(compute(swapped, bias)))
    assert "differs in" in str(probe.difference(compute(weight, bias * 0)))


def test_nan_outputs_are_right_only_where_the_reference_has_nan() -> None:
    """A checkpoint full of NaN can be loaded: NaN outputs are right exactly where the reference has NaN."""
    import torch

    from rollbus.workers.engines.vllm.probes import linear_probe

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight[2] = float("nan")
    probe = linear_probe(weight, None, torch.float32)
    right = probe.inputs @ weight.T

    assert probe.difference(right) is None
    assert probe.difference(right.nan_to_num()) is not None


def test_numbers_near_zero_may_become_zero() -> None:
    """A probe accepts zeros for denormal weights, as of a token that no text has: kernels flush them to zero."""
    import torch

    from rollbus.workers.engines.vllm.probes import linear_probe

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight[3] = 1e-39
    probe = linear_probe(weight, None, torch.bfloat16)
    flushed = torch.where(weight.abs() < 1e-38, torch.zeros_like(weight), weight)

    assert bool((weight[3] != 0).all())
    assert probe.difference(probe.inputs @ flushed.T) is None


@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_probe_uses_each_expert(dtype: str, activation: str) -> None:
    """Experts computed in this dtype pass, and a probe detects the replacement of any expert."""
    import torch

    from rollbus.workers.engines.vllm.probes import ACTIVATIONS, Experts, experts_probe, experts_routing

    kind, act = getattr(torch, dtype), ACTIVATIONS[activation]
    generator = torch.Generator().manual_seed(1)
    w13 = (torch.randn(5, 64, 128, generator=generator) * 0.1).to(kind)
    w2 = (torch.randn(5, 128, 32, generator=generator) * 0.1).to(kind)
    probe = experts_probe(Experts(w13=w13, w2=w2, w13_bias=None, w2_bias=None, activation=act), 2, kind)
    ids, weights = experts_routing(5, 2)

    def compute(w2: torch.Tensor) -> torch.Tensor:
        rows = []
        for x, chosen, shares in zip(probe.inputs, ids, weights, strict=True):
            row = torch.zeros(128)
            for expert, share in zip(chosen, shares, strict=True):
                gate, up = act.split(w13[expert] @ x)
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
                row += share * (w2[expert] @ (act.apply(gate) * (up + act.offset))).float()
            rows.append(row)
        return torch.stack(rows)

    assert probe.difference(compute(w2)) is None
    for expert in range(5):
        other = w2.clone()
        other[expert] = w2[(expert + 1) % 5]
        assert probe.difference(compute(other)) is not None
