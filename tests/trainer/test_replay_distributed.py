"""Replay of models that are wrapped for distributed training, in a group of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed

from rollbus.trainer.replay import replay
from tests.trainer.models import build, difference, moe_blocks, random_rows, router_of, run

pytestmark = pytest.mark.slow
ROWS = random_rows(11, 2)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """Return the results of the unwrapped model."""
    model = build(num_layers=2)
    with replay(model, ROWS):
        return run(model)


def test_distributed_data_parallel_computes_with_the_given_experts(expected: dict[str, torch.Tensor]) -> None:
    """DistributedDataParallel computes with the given experts."""
    model = torch.nn.parallel.DistributedDataParallel(build(num_layers=2))
    with replay(model, ROWS):
        found = run(model)
    assert difference(expected, {name.removeprefix("module."): tensor for name, tensor in found.items()}) < 1e-6


@pytest.mark.parametrize("routers_too", [False, True])
def test_sharded_layers_and_routers_compute_with_the_given_experts(
    expected: dict[str, torch.Tensor], routers_too: bool
) -> None:
    """Sharded layers and sharded routers, which change their class, compute with the given experts and stay sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (1,))
    model: Any = build(num_layers=2)
    for layer in model.model.layers:
        if routers_too:
            fully_shard(layer.mlp.gate, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    classes = [type(router_of(block)) for block in moe_blocks(model)]
    with replay(model, ROWS):
        found = run(model)
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}
    assert difference(expected, whole) < 1e-6
    assert [type(router_of(block)) for block in moe_blocks(model)] == classes
