"""Puts the control of a worker together."""

from pathlib import Path

from bus.objects import ObjectReader
from workers.config import WorkerConfig
from workers.control.control import Control
from workers.control.loras import Loras
from workers.control.parts import Parts
from workers.control.registers import Registers
from workers.control.transfer import Transfer
from workers.control.weights import Weights
from workers.sources import Sources

__all__ = ["make_control", "make_sources"]


def make_sources(config: WorkerConfig) -> Sources:
    """Where this worker's weights and adapters may come from."""
    return Sources(
        roots=[Path(root) for root in config.weight_roots],
        own=None if config.model_path is None else Path(config.model_path),
        cache=Path(config.cache_dir) / config.fleet / config.worker_id,
        objects=ObjectReader(config.server, name=f"rollbus worker {config.worker_id}"),
    )


def make_control(parts: Parts, sources: Sources) -> Control:
    """The control of the worker around it; nothing of it runs yet."""
    runner, flow, versions = parts.runner, parts.flow, parts.links.versions
    loras = Loras(runner, flow, sources, versions)
    weights = Weights(parts.config, runner, flow, sources, loras, versions)
    transfer = Transfer(runner, flow, weights)
    return Control(parts, Registers(runner, flow, weights, loras, transfer))
