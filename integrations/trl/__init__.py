"""Connects the trainers of TRL to a fleet: rollouts and new weights for `GRPOTrainer` and `AsyncGRPOTrainer`.

    from rollbus.integrations.trl import PublishPolicy, Rollouts

    trainer = GRPOTrainer(
        model,
        rollout_func=Rollouts("nats://127.0.0.1:4222", model="policy"),
        callbacks=[PublishPolicy("nats://127.0.0.1:4222", model="policy", checkpoint=model)],
        ...
    )

Written for the interfaces of trl 1.16.
"""

from ..publisher import PolicyPublisher
from .async_grpo import RolloutWorker, WeightTransfer
from .grpo import PublishPolicy, Rollouts

__all__ = ["PolicyPublisher", "PublishPolicy", "RolloutWorker", "Rollouts", "WeightTransfer"]
