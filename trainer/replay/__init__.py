"""Router replay: a Hugging Face mixture of experts computes with the experts that the sampler chose.

    with replay(model, batch.routed_experts):
        loss = loss_of(model(**batch.model_inputs()))
        loss.backward()

`context` is the block, `formulas` knows which routers can be replayed and how each weighs its experts, `routers` finds
them in a model and checks rows against them, `rerouting` changes what one router returns, and `checkpoints` notices
that a call will be computed again.
"""

from .context import replay
from .formulas import SUPPORTED

__all__ = ["SUPPORTED", "replay"]
