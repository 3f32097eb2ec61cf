"""The placement policies of all models with a live worker. A model's policy ends with its last worker."""

from ....schemas.presence import WorkerPresence
from .policy import PlacementPolicy

__all__ = ["ModelPolicies"]


class ModelPolicies:
    """One policy for each model, from the presence of the workers.

    Workers choose the name of their model. So names are kept only for the live workers, whose number the presence table
    limits.
    """

    def __init__(self) -> None:
        self._policies: dict[str, PlacementPolicy] = {}
        # By worker.
        self._models: dict[str, str] = {}

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<ModelPolicies models={len(self._policies)} workers={len(self._models)}>"

    def __len__(self) -> int:
        """Return the number of models with a policy."""
        return len(self._policies)

    def of(self, model: str) -> PlacementPolicy:
        """Return the policy of a model. Without a worker it is an empty one: the queue gets all requests."""
        return self._policies.get(model) or PlacementPolicy()

    def update(self, presence: WorkerPresence, now: float) -> PlacementPolicy:
        """Handle the presence of a live worker, and return the policy of its model."""
        worker, model = presence.worker, presence.model
        if self._models.get(worker) != model:
            self.remove(worker)
            self._models[worker] = model
            self._policies.setdefault(model, PlacementPolicy())
        policy = self._policies[model]
        policy.update(presence, now)
        return policy

    def remove(self, worker: str) -> None:
        """Remove a lost worker, and the policy of its model if no other worker has that model."""
        model = self._models.pop(worker, None)
        if model is not None:
            self._policies[model].remove(worker)
            if not self._policies[model].loads:
                del self._policies[model]
