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
