"""What is added to vLLM's worker class, which lives in the engine's processes: methods that `Calls.on_workers` calls.

vLLM takes the name of one class for that (`worker_extension_cls`). Where the user gives one too, vLLM gets the name of
a class that is both, which this module makes up when it is asked for: `extension_name` says how it is called.
"""

import logging
from typing import Any

from ....schemas.errors import ControlCode
from ....schemas.foreign_code import ForeignError, foreign_code
from .answers import done, failed
from .reloading import Reload, clear_nan
from .rotations import rotate_all_heads
from .seeds import keep_seeded_draws

__all__ = ["WorkerExtension", "extension_name", "is_ours"]

logger = logging.getLogger(__name__)

AND = "+"
DOT = ":"
"""Stands for the dots of the user's class, as vLLM takes what is behind the last dot for the name of a class."""


class WorkerExtension:
    """The methods. They never raise, see `Calls.on_workers`; their names clash with none of vLLM's."""

    def rollbus_correct(self) -> dict[str, Any]:
        """Correct what vLLM does wrong on a CPU; called once, before the first request.

        See `keep_seeded_draws` and `rotate_all_heads`.
        """
        worker: Any = self
        for what, correct in (("seeded requests", keep_seeded_draws), ("rotary embeddings", rotate_all_heads)):
            try:
                correct(worker.model_runner)
            except AttributeError as exc:
                return failed(ControlCode.ENGINE_ERROR, f"{what} would not be right: {exc}")
        return done()

    def rollbus_load_weights(self, path: str) -> dict[str, Any]:
        """Replace all weights by those in the folder `path`; see `Reload.load`."""
        return self._rollbus_reload().load(path)

    def rollbus_transfer(self, step: str, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of vLLM's weight transfer; see `Reload.transfer`."""
        return self._rollbus_reload().transfer(step, info)

    def rollbus_load_lora(self, name: str, number: int, path: str) -> dict[str, Any]:
        """Load an adapter, or replace the one of this number; an error says nothing about what is left of that."""
        from vllm.lora.request import LoRARequest

        worker: Any = self
        try:
            with foreign_code():
                if worker.add_lora(LoRARequest(name, number, path, load_inplace=True)):
                    return done()
        except ForeignError as exc:
            logger.exception("lora.load_failed name=%s", name)
            return failed(ControlCode.ENGINE_ERROR, exc)
        return failed(ControlCode.ENGINE_ERROR, "vLLM did not take it and says nothing more")

    def rollbus_clear_nan(self) -> dict[str, Any]:
        """Replace NaN and infinities in the KV cache by zeros; see `clear_nan`."""
        worker: Any = self
        try:
            with foreign_code():
                clear_nan(worker.model_runner.kv_caches)
        except ForeignError as exc:
            # A release that keeps its cache in another way.
            logger.exception("cache.nan_clear_failed")
            return failed(ControlCode.ENGINE_ERROR, exc)
        return done()

    def _rollbus_reload(self) -> Reload:
        """The one object for this worker; a mixed-in class has no constructor that vLLM would call."""
        reload: Reload | None = self.__dict__.get("_rollbus_reload_state")
        if reload is None:
            reload = self.__dict__["_rollbus_reload_state"] = Reload(self)
        return reload


OWN = f"{__name__}.{WorkerExtension.__name__}"


def extension_name(other: str | None) -> str:
    """What to give vLLM as `worker_extension_cls`.

    Args:
        other: the dotted name of the user's own class.
    """
    return OWN if not other else f"{OWN}{AND}{other.replace('.', DOT)}"


def is_ours(worker_extension_cls: str | None) -> bool:
    """A vLLM with this `worker_extension_cls` is the engine of a rollbus worker; the name goes to all its processes."""
    return worker_extension_cls is not None and worker_extension_cls.partition(AND)[0] == OWN


def __getattr__(name: str) -> Any:
    own, separator, other = name.partition(AND)
    if own != WorkerExtension.__name__ or not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return type(name, (WorkerExtension, resolve_obj_by_qualname(other.replace(DOT, "."))), {})
