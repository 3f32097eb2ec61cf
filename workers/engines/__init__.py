"""The engines that a worker can run, by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import InvalidRequest
from workers.engine import Engine

__all__ = ["ENGINES", "make_engine"]


def _vllm(model: str, engine_args: Mapping[str, Any]) -> Engine:
    # Imported when chosen: a synthetic worker needs neither vllm nor torch.
    from workers.engines.vllm import VllmEngine

    return VllmEngine(model, engine_args=engine_args)


def _synthetic(model: str, engine_args: Mapping[str, Any]) -> Engine:
    from workers.engines.synthetic import SyntheticConfig, SyntheticEngine

    return SyntheticEngine(SyntheticConfig.from_args(engine_args), Path(model) if model else None)


ENGINES: dict[str, Callable[[str, Mapping[str, Any]], Engine]] = {"vllm": _vllm, "synthetic": _synthetic}


def make_engine(name: str, model: str, engine_args: Mapping[str, Any]) -> Engine:
    """Make the engine called `name` for the checkpoint at `model`; it is not started.

    Raises:
        InvalidRequest: no engine of this name, or an argument that it does not take.
    """
    if name not in ENGINES:
        raise InvalidRequest(field="engine", problem=f"is {name!r}", allowed=", ".join(ENGINES))
    return ENGINES[name](model, engine_args)
