"""NeMo-RL with a fleet: `RollbusGeneration` has the methods of its `GenerationInterface`. NeMo Gym needs no code."""

from .generation import RollbusGeneration, RollbusWeights

__all__ = ["RollbusGeneration", "RollbusWeights"]
