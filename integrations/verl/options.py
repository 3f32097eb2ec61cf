"""The options below `actor_rollout_ref.rollout.engine_kwargs.rollbus`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from ...schemas.checks import check_float, check_int, check_name, describe
from ...schemas.errors import InvalidRequest
from ...schemas.limits import MAX_COUNT, MAX_TIMEOUT_S
from ..rows import check_row_dtype

PLACE: Final = "engine_kwargs.rollbus"
UPDATES: Final = ("abort", "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where the fleet is, and how verl uses it. The constructor checks all fields."""

    url: str | None = None
    """URL of the NATS server. None: as in `rollbus.connect`."""
    fleet: str | None = None
    """Name of the fleet. None: as in `rollbus.connect`."""
    credentials: str | None = None
    """File with the credentials of the NATS user, at the same path on all nodes. None: none."""
    model: str
    """Served name of the model. Default: the last part of verl's model path, as of a worker."""
    checkpoint: str
    """Folder of the checkpoint with which training began. Default: verl's model path."""
    update: str = "abort"
    """`abort`: verl's call before an update ends open requests with their tokens, and verl's client resumes them.
    `keep`: that call has no effect; the fleet holds the requests while it switches, and computes their KV again. Their
    tokens span versions."""
    min: int | None = None
    """Workers that must have loaded new weights. None: all that are alive."""
    timeout_s: float | None = None
    """Seconds for a request. None: the default of `GenerateRequest`."""
    start_timeout_s: float = 600.0
    """Seconds to wait for the first worker at the start."""
    update_timeout_s: float = 1800.0
    """Seconds for an update, from verl's call until the workers have loaded the weights."""
    rows: str = "int16"
    """Dtype of routed experts. verl's agent loop makes int16 of them, whatever their dtype is."""

    def __post_init__(self) -> None:
        for name in ("url", "fleet", "credentials", "checkpoint"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{PLACE}.{name}", f"is {describe(value)}", "a string")
        check_name(f"{PLACE}.model", self.model)
        if self.update not in UPDATES:
            raise InvalidRequest(f"{PLACE}.update", f"is {self.update!r}", " or ".join(UPDATES))
        if self.min is not None:
            check_int(f"{PLACE}.min", self.min, 1, MAX_COUNT)
        for name in ("timeout_s", "start_timeout_s", "update_timeout_s"):
            if getattr(self, name) is not None:
                check_float(f"{PLACE}.{name}", getattr(self, name), 0, MAX_TIMEOUT_S)
        check_row_dtype(self.rows, None)

    @classmethod
    def parse(cls, engine_kwargs: Mapping[str, Any] | None, model_path: str) -> Self:
        """Return the options of a rollout configuration.

        Args:
            engine_kwargs: `actor_rollout_ref.rollout.engine_kwargs`.
            model_path: `actor_rollout_ref.model.path`.

        Raises:
            InvalidRequest: an option is unknown, or its value is not allowed. The error names it.
        """
        found = (engine_kwargs or {}).get("rollbus") or {}
        if not isinstance(found, Mapping):
            raise InvalidRequest(PLACE, f"is {describe(found)}", "a mapping of options")
        names = [field.name for field in fields(cls)]
        for name in found:
            if name not in names:
                raise InvalidRequest(f"{PLACE}.{name}", "is no option", ", ".join(names))
        return cls(**{"model": Path(model_path).name, "checkpoint": model_path, **found})
