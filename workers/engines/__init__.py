"""The engines that a worker can run, by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.presence import Role
from .engine import Engine

__all__ = ["ENGINES", "make_engine"]


def _vllm(model: str, engine_args: Mapping[str, Any], role: Role | None) -> Engine:
    # Imported when chosen: a synthetic worker needs neither vllm nor torch.
    from .vllm import VllmEngine

    return VllmEngine(model, engine_args=engine_args, role=role or "both")


def _synthetic(model: str, engine_args: Mapping[str, Any], role: Role | None) -> Engine:
    from .synthetic import SyntheticConfig, SyntheticEngine

    args = engine_args if role is None else {**engine_args, "role": role}
    return SyntheticEngine(SyntheticConfig.from_args(args), Path(model) if model else None)


ENGINES: dict[str, Callable[[str, Mapping[str, Any], Role | None], Engine]] = {"vllm": _vllm, "synthetic": _synthetic}


def make_engine(name: str, model: str, engine_args: Mapping[str, Any], role: Role | None = None) -> Engine:
    """Make the engine called `name` for the checkpoint at `model`; it is not started.

    Args:
        role: None: whole requests, unless `engine_args` say otherwise.

    Raises:
        InvalidRequest: no engine of this name, an argument that it does not take, or one that contradicts the role.
    """
    if name not in ENGINES:
        raise InvalidRequest(field="engine", problem=f"is {name!r}", allowed=", ".join(ENGINES))
    return ENGINES[name](model, engine_args, role)
