"""Router replay: a Hugging Face mixture of experts computes with the experts that the sampler chose.

    with replay(model, batch.routed_experts):
        loss = loss_of(model(**batch.model_inputs()))
        loss.backward()

`context` has the block. `formulas` lists the routers that can be replayed and how each weighs its experts. `routers`
finds the routers of a model and checks rows against them. `rerouting` changes the output of one router. `checkpoints`
detects calls that gradient checkpointing will compute again.
"""

from .context import replay
from .formulas import SUPPORTED

__all__ = ["SUPPORTED", "replay"]
