"""verl's rollouts and weights on a rollbus fleet: `actor_rollout_ref.rollout.name=rollbus`.

verl imports this module as a plugin (entry point `verl.plugins`, or `VERL_USE_EXTERNAL_MODULES`). The module registers
the rollout `rollbus` then. `rollbus.integrations.verl.weights`, named in `checkpoint_engine.custom_backend_module`,
registers the checkpoint engine `rollbus`. The modules `options` and `outputs` need no verl.
"""

import sys
import warnings
from importlib.metadata import version
from typing import Final

NAME: Final = "rollbus"
"""Name of the rollout and of the checkpoint engine."""
RELEASES: Final = "0.9."
"""Releases of verl whose interfaces this adapter implements."""


def register() -> None:
    """Register the rollout with verl. In another release of verl than 0.9, give one warning with both versions."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    found = version("verl")
    if not found.startswith(RELEASES):
        warnings.warn(f"rollbus {version('rollbus')} is made for verl {RELEASES}x; this is verl {found}", stacklevel=2)
    RolloutReplicaRegistry.register(NAME, _load_replica)
    base._ROLLOUT_REGISTRY[(NAME, "async")] = "rollbus.integrations.verl.replica.ServerAdapter"
    from .client import extend_clients

    extend_clients()


def _load_replica() -> type:
    from .replica import RollbusReplica

    return RollbusReplica


if "verl" in sys.modules:  # verl imports its plugins; tests of the pure modules have no verl
    register()
