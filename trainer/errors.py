"""Errors between the results of rollbus and a training step.

RollbusError (rollbus.schemas.errors)
├── StitchError          turns, attempts or pieces of routed experts do not form one sequence
├── PackError            a sample contradicts itself, or samples cannot become micro-batches
├── ReplayError          a model cannot use the given routed experts
└── CheckpointMismatch   a model's tensors differ from those of its checkpoint
"""

from ..schemas.errors import RollbusError

__all__ = ["CheckpointMismatch", "PackError", "ReplayError", "StitchError"]


class StitchError(RollbusError, ValueError):
    """Pieces do not form one sequence: they have a gap, contradict each other, or have another model's layout."""


class PackError(RollbusError, ValueError):
    """A sample contradicts itself, or samples cannot become micro-batches."""


class ReplayError(RollbusError):
    """A model cannot use the given routed experts, or is used in a way that would silently choose other experts."""


class CheckpointMismatch(RollbusError):
    """A model's tensors differ from those of its checkpoint, or are only slices."""
