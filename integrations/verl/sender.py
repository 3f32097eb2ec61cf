"""Stores the trainer's weights for a fleet and tells the servers, which make the workers load them."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...schemas.errors import RollbusError
from ..publisher import PolicyPublisher
from .options import Options
from .outputs import RolloutFailed


class Sender:
    """Sends versions of the weights from rank 0 of the trainer. It holds the publisher's lease until its process ends.

    Args:
        options: options of the rollout.
    """

    def __init__(self, options: Options) -> None:
        settings = {name: getattr(options, name) for name in ("fleet", "credentials")}
        self._publisher = PolicyPublisher(
            options.url,
            model=options.model,
            checkpoint=options.checkpoint,
            **{name: value for name, value in settings.items() if value is not None},
        )

    async def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, update: str, step: int | None, servers: Sequence[Any]
    ) -> dict[str, float]:
        """Store a version, and return at its commit. If that fails, the servers resume generation with the old version.

        This blocks the event loop: the tensors are drawn by the caller's thread, which has its CUDA device.

        Args:
            weights: all tensors of the model, named as in the checkpoint.
            update: id of the update, the same at all servers.
            step: verl's `global_steps`.
            servers: handles of the actors `RollbusServer`.

        Raises:
            RolloutFailed: the version was not stored.
        """
        try:
            stored = self._publisher.store(weights)
        except Exception as error:  # the trainer's own code made the tensors
            reason = f"the trainer did not store its weights: {type(error).__name__}: {error}"
            await wait_all([server.fail_update.remote(update, reason) for server in servers])
            if isinstance(error, RollbusError):
                raise RolloutFailed(reason) from error
            raise
        await wait_all(
            [server.commit_update.remote(update, stored.version, stored.objects, step) for server in servers]
        )
        return {
            "rollbus/version": float(stored.version),
            "rollbus/stored_bytes": float(stored.stored_bytes),
            "rollbus/store_s": stored.seconds,
        }


def new_update() -> str:
    """Return an id for an update."""
    return uuid.uuid4().hex


async def wait_all(calls: Sequence[Any]) -> list[Any]:
    """Return the results of Ray calls that run already."""
    return [await call for call in calls]


def exhaust(weights: Iterable[Any]) -> None:
    """Draw all tensors of a rank that does not send them: the ranks gather each tensor together."""
    for _ in weights:
        pass
