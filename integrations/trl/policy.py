"""A callback for trainers of transformers, and so of TRL: the fleet gets the policy as training goes on."""

from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from ...schemas.checks import check_int
from .publisher import PolicyPublisher

__all__ = ["PublishPolicy"]

MAX_EVERY = 1_000_000


class PublishPolicy(PolicyPublisher, TrainerCallback):  # type: ignore[misc] # transformers is not read by mypy
    """Publishes the policy when training begins, and after every k-th optimizer step; training waits for it.

        GRPOTrainer(model, callbacks=[PublishPolicy(url, model="policy", checkpoint=folder)], ...)

    The fleet then computes with these weights, and every token says so. Only what changed travels. Rank 0 publishes,
    and the others wait; if it cannot, training ends on all of them. The model must be whole on it: one process, or DDP.

    Args:
        url: of the NATS server; None: as in `rollbus.connect`.
        every: optimizer steps between two versions.
        settings: the other arguments of `PolicyPublisher`: `model` and `checkpoint`, and what `rollbus.connect` takes.

    Attributes:
        version: that the fleet has; None before training, and on other ranks than 0.
    """

    def __init__(self, url: str | None = None, *, every: int = 1, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._every = check_int("every", every, 1, MAX_EVERY)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy that training begins with."""
        self._publish_from(kwargs["model"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy after every k-th step."""
        if state.global_step % self._every == 0:
            self._publish_from(kwargs["model"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the lease back."""
        self.close()

    def _publish_from(self, model: Any, state: Any) -> None:
        is_published = False
        try:
            if state.is_world_process_zero:
                self.publish_model(getattr(model, "module", model))
            is_published = True
        finally:
            # Also of a failure: the other ranks would wait for this one in vain.
            [is_published] = broadcast_object_list([is_published])
        if not is_published:
            raise RuntimeError("rank 0 has not published the policy; its own error says why")
