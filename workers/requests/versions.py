"""The weight versions of a worker."""

from dataclasses import dataclass, field

__all__ = ["Versions"]


@dataclass(slots=True)
class Versions:
    """The current versions, which the worker attaches to each engine step."""

    weight_version: int
    """Version of the weights that the engine samples from."""
    target_version: int
    """Version of the desired weights."""
    loras: dict[str, int] = field(default_factory=dict)
    """Version of each loaded adapter, by its name in requests."""
    desired_loras: frozenset[str] = frozenset()
    """Names of the desired adapters of the model. Another worker may have an adapter that this worker lacks."""
    model: str = ""
    """Name of the model. An adapter of this name answers the requests for the model."""
    base_adapter_version: int | None = None
    """Desired version of the adapter with the model's name on this worker; None: none is desired."""

    def adapter_of(self, lora: str | None) -> str | None:
        """Return the adapter that a request with this `lora` uses."""
        has_adapter = self.base_adapter_version is not None or self.model in self.loras
        return self.model if lora is None and has_adapter else lora

    def served(self, lora: str | None) -> int:
        """Return the version with which `min_weight_version` and `max_weight_lag` compare, for the adapter in use."""
        return self.loras.get(self.model, self.weight_version) if lora == self.model else self.weight_version

    def target(self, lora: str | None) -> int:
        """Return the desired value of `served`."""
        return (self.base_adapter_version or 0) if lora == self.model else self.target_version
