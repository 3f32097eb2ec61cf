"""The engines that a worker can run, by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.presence import WorkerRole
from .engine import Engine


def _vllm(model: str, engine_args: Mapping[str, Any], role: WorkerRole | None) -> Engine:
    # Import only when selected: a synthetic worker needs neither vllm nor torch.
    from .vllm.engine import VllmEngine

    return VllmEngine(model, engine_args=engine_args, role=role or "both")


def _synthetic(model: str, engine_args: Mapping[str, Any], role: WorkerRole | None) -> Engine:
    from .synthetic.config import SyntheticConfig
    from .synthetic.engine import SyntheticEngine

    args = engine_args if role is None else {**engine_args, "role": role}
    return SyntheticEngine(SyntheticConfig.from_args(args), Path(model) if model else None)


ENGINES = {"vllm": _vllm, "synthetic": _synthetic}


def make_engine(name: str, model: str, engine_args: Mapping[str, Any], role: WorkerRole | None = None) -> Engine:
    """Create the engine `name` for the checkpoint at `model`, without starting it.

    Args:
        role: None: prefill and decode together, unless `engine_args` set another role.

    Raises:
        InvalidRequest: no engine has this name, an argument is unknown, or an argument contradicts the role.
    """
    if name not in ENGINES:
        raise InvalidRequest("engine", f"is {name!r}", ", ".join(ENGINES))
    return ENGINES[name](model, engine_args, role)


def preload(name: str, model: str) -> None:
    """Import what the engine `name` needs into this process, which has no other thread yet. This may take seconds."""
    if name == "vllm":
        from .vllm import launch, processes

        launch.set_environment(model, None)
        processes.preload()
