"""A callback for transformers and TRL trainers that publishes the policy to the fleet during training."""

from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from ...schemas.checks import check_int
from .publisher import PolicyPublisher

__all__ = ["PublishPolicy"]

MAX_EVERY = 1_000_000


class PublishPolicy(PolicyPublisher, TrainerCallback):  # type: ignore[misc] # transformers is not read by mypy
    """Publishes the policy at the start of training and after every k-th optimizer step. Training waits for it.

        GRPOTrainer(model, callbacks=[PublishPolicy(url, model="policy", checkpoint=folder)], ...)

    Afterwards the fleet computes with these weights, and every token has their version. Only changes are transferred.
    Rank 0 publishes, and the other ranks wait. If rank 0 cannot publish, training ends on all ranks. The model must be
    whole on rank 0: use one process, or DDP.

    Args:
        url: URL of the NATS server. None: as in `rollbus.connect`.
        every: optimizer steps between two versions (default: 1).
        settings: further arguments of `PolicyPublisher`: `model`, `checkpoint`, and arguments of `rollbus.connect`.

    Attributes:
        version: version of the fleet. None before training, and on ranks other than 0.
    """

    def __init__(self, url: str | None = None, *, every: int = 1, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._every = check_int("every", every, 1, MAX_EVERY)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy at the start of training."""
        self._publish_from(kwargs["model"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the policy after every k-th step."""
        if state.global_step % self._every == 0:
            self._publish_from(kwargs["model"], state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Release the lease."""
        self.close()

    def _publish_from(self, model: Any, state: Any) -> None:
        is_published = False
        try:
            if state.is_world_process_zero:
                self.publish_model(getattr(model, "module", model))
            is_published = True
        finally:
            # Report a failure too, because the other ranks would wait for this rank forever.
            [is_published] = broadcast_object_list([is_published])
        if not is_published:
            raise RuntimeError("rank 0 has not published the policy; see the error of rank 0")
