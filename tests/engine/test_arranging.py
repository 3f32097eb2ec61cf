"""The reference of a module after a load: the received tensors, arranged by the module's own loaders."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


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
