"""Program for the trainers' Python: it feeds rows to Megatron-Core's router replay and prints `ok` on success."""

import dataclasses

import numpy as np
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay

from rollbus.integrations.megatron import feed, replay
from rollbus.trainer import ReplayError, Sample, pack

EXPERTS, TOP_K, LAYERS, HIDDEN, LENGTH = 8, 2, 3, 16, 11
torch.manual_seed(0)
rng = np.random.default_rng(0)


class Moe(torch.nn.Module):
    """One layer: Megatron's routing of a linear router, and linear experts."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN)
        self.replay = RouterReplay()
        self.maps = []

    def forward(self, x):
        """Apply the layer to f32[T, HIDDEN]."""
        probs, routing_map = topk_routing_with_score_function(self.router(x), TOP_K, router_replay=self.replay)
        self.maps.append(routing_map)
        return x + torch.einsum("te,ehd,th->td", probs, self.experts, x)


def chosen(maps):
    """Return the set of experts of each token, in token order."""
    return [set(torch.nonzero(row).flatten().tolist()) for row in maps]


rows = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS + 1)] for _ in range(LENGTH - 1)])
sample = Sample(
    token_ids=rng.integers(0, 100, LENGTH).astype(np.int32),
    loss_mask=np.arange(LENGTH) >= 4,
    logprobs=np.zeros(LENGTH, np.float32),
    weight_versions=np.where(np.arange(LENGTH) >= 4, 1, -1).astype(np.int32),
    routed_experts=rows.astype(np.uint8),
    advantage=1.0,
)
[batch] = pack([sample], max_tokens=16, pad_to_multiple_of=16)
model = torch.nn.Sequential(*(Moe() for _ in range(LAYERS)))
x = torch.randn(batch.input_ids.shape[1], HIDDEN)

# The rows have one layer more than this pipeline stage, whose routers are those of layers 1 to 3.
with replay(batch, layers=[1, 2, 3]) as replayed:
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    replayed.begin_backward()
    out.square().mean().backward()
for index, layer in enumerate(model):
    assert len(layer.maps) == 2, "the forward pass, and its recomputation"
    for routing_map in layer.maps:
        assert chosen(routing_map)[: LENGTH - 1] == [set(row[index + 1].tolist()) for row in rows]
        assert all(len(experts) == TOP_K for experts in chosen(routing_map))
    assert layer.router.weight.grad.abs().sum() > 0
    assert layer.replay.router_replay_action is None
    assert layer.replay.replay_backward_list == []

# A subset of the tokens in another order.
own = torch.tensor([7, 2, 5])
with replay(batch, layers=[0, 1, 2], tokens=own):
    model(x[own])
for index, layer in enumerate(model):
    assert chosen(layer.maps[-1]) == [set(rows[token][index].tolist()) for token in own]

# Outside of the block, the routers choose the experts.
free = model[0].router(x).topk(TOP_K).indices
model(x)
assert chosen(model[0].maps[-1]) == [set(row.tolist()) for row in free]

for wrong, says in (
    ({"layers": [0, 1]}, "3 routers"),
    ({"layers": [0, 1, 4]}, "layers has 4; allowed: 0 to 3"),
    ({"layers": [0, 1, 2], "tokens": torch.tensor([16])}, "allowed: 0 to 15"),
):
    try:
        feed(batch, **wrong)
    except ReplayError as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"{wrong} was not refused")
try:
    feed(dataclasses.replace(batch, routed_experts=None), layers=[0, 1, 2])
except ReplayError as error:
    assert "no routed experts" in str(error)
else:
    raise AssertionError("a batch without routing was not refused")
print("ok")
