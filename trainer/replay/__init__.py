"""Router replay: a Hugging Face mixture of experts computes with the experts that the sampler chose.

    with replay(model, batch.routed_experts):
        loss = loss_of(model(input_ids=batch.input_ids, position_ids=batch.position_ids))
        loss.backward()

`context` is the block, `formulas` knows which routers can be replayed and how each weighs its experts, `routers` finds
them in a model and checks rows against them, and `rerouting` changes what one router returns.
"""

from trainer.replay.context import replay
from trainer.replay.formulas import SUPPORTED

__all__ = ["SUPPORTED", "replay"]
