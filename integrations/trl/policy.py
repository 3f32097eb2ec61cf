"""A callback for trainers of transformers, and so of TRL: the fleet gets the policy as training goes on."""

import os
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from ...bus.client.weights.results import PublishedWeights
from ...schemas.checks import check_int
from ...schemas.errors import InvalidRequest
from ...trainer.checkpoint import checkpoint_tensors
from .publisher import PolicyPublisher

__all__ = ["PublishPolicy"]

MAX_EVERY = 1_000_000


class PublishPolicy(TrainerCallback):  # type: ignore[misc] # transformers is not read by mypy
    """Publishes the policy when training begins, and after every k-th optimizer step; training waits for it.

        GRPOTrainer(model, callbacks=[PublishPolicy(url, model="policy", checkpoint=folder)], ...)

    The fleet then computes with these weights, and every token says so. Only what changed travels. Rank 0 publishes,
    and the others wait. The model must be whole on it: one process, or DDP.

    Args:
        url: of the NATS server; None: as in `rollbus.connect`.
        model: served name.
        checkpoint: folder of the checkpoint with which training begins, and which the workers serve.
        every: optimizer steps between two versions.
        options: `fleet` and `credentials`, as in `rollbus.connect`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str,
        checkpoint: str | os.PathLike[str],
        every: int = 1,
        **options: Any,
    ) -> None:
        self._publisher = PolicyPublisher(url, model=model, checkpoint=checkpoint, **options)
        self._every = check_int("every", every, 1, MAX_EVERY)

    def __repr__(self) -> str:
        """One line with the version."""
        return f"<PublishPolicy {self._publisher!r} every={self._every}>"

    @property
    def version(self) -> int | None:
        """Of the weights that the fleet has; None before training, and on other ranks than 0."""
        return self._publisher.version

    @property
    def last(self) -> PublishedWeights | None:
        """What the last publication came to."""
        return self._publisher.last

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy that training begins with."""
        self._publish(kwargs["model"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy after every k-th step."""
        if state.global_step % self._every == 0:
            self._publish(kwargs["model"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the lease back."""
        self._publisher.close()

    def _publish(self, model: Any, state: Any) -> None:
        if state.is_world_process_zero:
            model = getattr(model, "module", model)
            if hasattr(model, "peft_config"):
                allowed = "a model whose own weights are trained"
                raise InvalidRequest(field="model", problem="has adapters of PEFT", allowed=allowed)
            self._publisher.publish(checkpoint_tensors(model, self._publisher.checkpoint))
        PartialState().wait_for_everyone()
