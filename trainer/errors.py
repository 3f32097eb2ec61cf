"""What can go wrong between the bus and a training step.

RollbusError (rollbus.schemas.errors)
├── StitchError          turns, attempts or pieces of routing do not make one sequence
├── PackError            a sample contradicts itself, or samples cannot become micro-batches
├── ReplayError          a model cannot use the routing it was given
└── CheckpointMismatch   a model's tensors are not those of its checkpoint
"""

from ..schemas.errors import RollbusError

__all__ = ["CheckpointMismatch", "PackError", "ReplayError", "StitchError"]


class StitchError(RollbusError, ValueError):
    """Pieces do not make one sequence: a gap, an overlap that disagrees, or another model's layout."""


class PackError(RollbusError, ValueError):
    """A sample contradicts itself, or samples cannot become micro-batches."""


class ReplayError(RollbusError):
    """A model cannot use the routing it was given, or is used in a way that would silently route otherwise."""


class CheckpointMismatch(RollbusError):
    """A model's tensors are not those of its checkpoint, or are there only in slices."""
