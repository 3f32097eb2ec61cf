"""slime and vime with a fleet: rollouts over NATS, and weights from a directory that slime has written.

    --rollout-function-path rollbus.integrations.slime.generate_rollout
    --custom-generate-function-path rollbus.integrations.slime.generate
    --custom-update-weight-post-write-path rollbus.integrations.slime.update_weights

The functions set the attributes of the `Sample` that they receive. They are written for THUDM/slime at commit 624b824
and vllm-project/vime at commit 2b83ea2, which have no release on PyPI. They were not run with these packages.
"""

from .rollout import generate, generate_rollout
from .weights import update_weights

__all__ = ["generate", "generate_rollout", "update_weights"]
