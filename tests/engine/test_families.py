"""After an update, models of many families compute as transformers does with the new checkpoint, or the load fails."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollbus.schemas.errors import ControlCode
from tests.engine.family_updates import FAULTS
from tests.engine.tiny_families import FAMILIES, HALF

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-4
"""The tolerance of log probabilities in float32."""
HALF_TOLERANCE = 0.1
"""The tolerance of log probabilities in bfloat16."""


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of `family_updates`, and vLLM's log under `log`."""
    folder = tmp_path_factory.mktemp("families")
    command = [sys.executable, "-m", "tests.engine.family_updates", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results | {"log": done.stdout + done.stderr}


@pytest.mark.proves("P20")
@pytest.mark.parametrize("family", [*FAMILIES, "adapters"])
def test_updated_model_equals_transformers(updates: dict[str, Any], family: str) -> None:
    """After new weights are loaded, each family computes with them, and each of its modules was compared."""
    seen = updates[family]
    tolerance, different = (HALF_TOLERANCE, 10 * HALF_TOLERANCE) if family in HALF else (TOLERANCE, 100 * TOLERANCE)

    assert seen["started"] < tolerance
    assert seen["updated"] < tolerance
    assert seen["stale"] > different
    assert seen["answer"]["code"] is None
    assert seen["answer"]["probed"] >= 9
    assert seen["answer"]["unprobed"] == []


@pytest.mark.proves("P20")
@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family, faults in FAULTS.items() for fault in faults]
)
def test_a_planted_fault_is_found(updates: dict[str, Any], family: str, fault: str) -> None:
    """If a module does not compute with its new weights, the load fails and names it. A correct load repairs it."""
    answer = updates[family]["faults"][fault]
    _, module = FAULTS[family][fault]
    tolerance = HALF_TOLERANCE if family in HALF else TOLERANCE
    # On a CPU without AVX-512, vLLM makes no copies of the weights of a convolution, and computes with the new ones.
    if fault != "old copies" or answer["code"] is not None:
        assert answer["code"] == ControlCode.HALF_WRITTEN
        assert module in answer["error"]
    assert answer.get("updated", 0.0) < tolerance
    assert updates[family]["faults"]["repaired"]["updated"] < tolerance


def test_names_of_parameters_do_not_flood_the_log(updates: dict[str, Any]) -> None:
    """An update does not log vLLM's list of parameters that vLLM does not know to be loaded."""
    assert "WARNING" in updates["log"]
    assert "weights were not loaded" not in updates["log"]


# The reference of a module after a load: the received tensors, arranged by the module's own loaders.


def arranged(loader: Callable[..., None], *loads: tuple[Any, ...]) -> tuple[Any, int]:
    """Return the weight `[4, 3]` of a module after these loads, and how many of its elements got no value."""
    import torch

    from rollbus.workers.engines.vllm.reload_checks import arrange

    module = torch.nn.Module()
    weight: Any = torch.nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16, device="meta"), requires_grad=False)
    weight.weight_loader = loader
    module.weight = weight
    bound = [("weight", inspect.signature(loader).bind(weight, *load)) for load in loads]
    raw, absent = arrange(module, SimpleNamespace(loaded_weights=bound, restore_device="cpu"))
    assert weight.is_meta
    return raw["weight"], absent.get("weight", 0)


def tensor(rows: int, dtype: str = "bfloat16") -> Any:
    """Return a tensor `[rows, 3]` with different numbers."""
    import torch

    return torch.arange(1.0, 1 + 3 * rows).reshape(rows, 3).to(getattr(torch, dtype))


def copies(param: Any, loaded: Any) -> None:
    """Load the whole tensor, and pad the rest with zeros."""
    param[: len(loaded)].data.copy_(loaded)
    param[len(loaded) :].data.fill_(0)


def copies_rows(param: Any, loaded: Any, begin: int = 0) -> None:
    """Load some rows of the parameter."""
    param.data.narrow(0, begin, len(loaded)).copy_(loaded)


def copies_and_scales(param: Any, loaded: Any) -> None:
    """Load the whole tensor, and change the values."""
    param.data.copy_(loaded)
    param.data.mul_(2)


def copies_transposed(param: Any, loaded: Any) -> None:
    """Load the tensor with other strides."""
    param.data.t().copy_(loaded)


def test_tensors_are_arranged_in_separate_memory() -> None:
    """Whole tensors, parts, other types, padding and changed values are arranged as in the module."""
    import torch

    whole = tensor(4)
    cases: list[tuple[Callable[..., None], list[tuple[Any, ...]], Any]] = [
        (copies, [(whole,)], whole),
        (copies_rows, [(whole[:1], 0), (whole[1:], 1)], whole),
        (copies, [(tensor(4, "float32"),)], whole),
        (copies, [(whole[:3],)], torch.cat((whole[:3], torch.zeros(1, 3, dtype=whole.dtype)))),
        (copies_and_scales, [(whole,)], whole * 2),
        (copies_transposed, [(whole.t().contiguous(),)], whole),
    ]
    for loader, loads, expected in cases:
        found, num_absent = arranged(loader, *loads)

        assert torch.equal(found, expected)
        assert found.data_ptr() not in {load[0].data_ptr() for load in loads}
        assert num_absent == 0


def test_rows_without_a_tensor_are_counted() -> None:
    """Rows without a tensor are counted and differ from loaded zeros.

    If NaN was loaded, the number is unknown, and reported as 0.
    """
    found, num_absent = arranged(copies_rows, (tensor(3), 0))
    assert (num_absent, found[3].tolist()) == (3, [0, 0, 0])

    unknown = tensor(3)
    unknown[0, 0] = float("nan")
    assert arranged(copies_rows, (unknown, 0))[1] == 0


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


def run_experts(w13: Any, w2: Any, activation: str) -> Any:
    """Return the output of experts for the inputs of their probe, computed in their dtype."""
    import torch

    from rollbus.workers.engines.vllm.probes import ACTIVATIONS, expert_inputs, route_experts

    rows = []
    for x, ids, weights in zip(expert_inputs(w13), *route_experts(len(w13), 2), strict=True):
        outputs = [w2[expert] @ ACTIVATIONS[activation].join(w13[expert] @ x) for expert in ids]
        rows.append(sum(weight * output.float() for weight, output in zip(weights, outputs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_probe_uses_each_expert(dtype: str, activation: str) -> None:
    """Experts computed in this dtype pass, also with one large channel or with NaN.

    A probe detects the replacement of any expert, or of one row of it.
    """
    import torch

    from rollbus.workers.engines.vllm.probes import ACTIVATIONS, expect_experts, route_experts

    kind, act = getattr(torch, dtype), ACTIVATIONS[activation]
    generator = torch.Generator().manual_seed(1)
    w13 = (torch.randn(5, 64, 128, generator=generator) * 0.1).to(kind)
    w2 = (torch.randn(5, 128, 32, generator=generator) * 0.1).to(kind)

    def probe(w2: torch.Tensor) -> Any:
        return expect_experts({"w13_weight": w13, "w2_weight": w2}, act.join, route_experts(5, 2)[0])

    for large in (1, 100, float("nan")):
        right = w2.clone()
        right[3, 7] *= large
        assert probe(right).difference(run_experts(w13, right, activation)) == ""
    expected = probe(w2)
    for expert in range(5):
        other = w2.clone()
        other[expert] = w2[(expert + 1) % 5]
        assert expected.difference(run_experts(w13, other, activation)) != ""
        other = w2.clone()
        other[expert, int(expected.output[expert].abs().argmax())] = 0
        assert expected.difference(run_experts(w13, other, activation)) != ""


def test_parameters_of_any_dtype_are_compared() -> None:
    """Parameters are compared in their own dtype, also in one without arithmetic."""
    import torch

    from rollbus.workers.engines.vllm.probes import difference

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool):
        loaded = torch.tensor([1, 1, 0]).to(dtype)
        assert difference(loaded.clone(), loaded) == ""
        assert difference(torch.tensor([1, 0, 0]).to(dtype), loaded) == "differs in 1 of 3 numbers"


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
