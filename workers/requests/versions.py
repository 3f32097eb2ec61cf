"""Of which weights a worker's tokens are."""

from dataclasses import dataclass, field

__all__ = ["Versions"]


@dataclass(slots=True)
class Versions:
    """What holds now; whatever the engine hands over bears it."""

    weight_version: int
    """Of the weights that the engine samples from."""
    target_version: int
    """Of those that it should have."""
    loras: dict[str, int] = field(default_factory=dict)
    """Of each adapter that is loaded, by the name that requests call it."""
    desired_loras: frozenset[str] = frozenset()
    """Names of adapters that some worker of the model should have: another may have what this one lacks."""
