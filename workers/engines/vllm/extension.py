"""Methods for the vLLM worker class in the engine's processes; `Calls.on_workers` calls them.

vLLM accepts the name of one extension class (`worker_extension_cls`). If the user also has an extension class, vLLM
gets the name of a class that inherits from both. `extension_name` returns that name. This module creates the class when
vLLM imports it.
"""

import logging
from typing import Any

from ....schemas.errors import ControlCode, ForeignError, foreign_code
from .corrections import keep_seeded_draws, rotate_all_heads, separate_replicas
from .reload import Reload, clear_nan, done, failed

logger = logging.getLogger(__name__)

AND = "+"
DOT = ":"
"""Replaces the dots in the name of the user's class, because vLLM uses the part after the last dot as class name."""


class WorkerExtension:
    """The added methods. They never raise; see `Calls.on_workers`. Their names differ from all names of vLLM."""

    def rollbus_correct(self) -> dict[str, Any]:
        """Correct faults of vLLM on a CPU, and import what loads need. Call this once, before the first request.

        See the module `corrections`. An import that fails later would end in half-written weights.
        """
        worker: Any = self
        corrections = {
            "replicas": separate_replicas,
            "seeded requests": keep_seeded_draws,
            "rotary embeddings": rotate_all_heads,
        }
        for what, correct in corrections.items():
            try:
                correct(worker.model_runner)
            except AttributeError as exc:
                return failed(ControlCode.ENGINE_ERROR, f"cannot correct vLLM's {what}: {exc}")
        try:
            self._rollbus_reload()
        except ImportError as exc:
            return failed(ControlCode.ENGINE_ERROR, f"this release of vLLM lacks what the checks of loads need: {exc}")
        return done()

    def rollbus_load_weights(self, path: str) -> dict[str, Any]:
        """Replace all weights by those in the folder `path`; see `Reload.load`."""
        return self._rollbus_reload().load(path)

    def rollbus_transfer(self, step: str, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of vLLM's weight transfer; see `Reload.transfer`."""
        return self._rollbus_reload().transfer(step, info)

    def rollbus_abandon_transfer(self) -> dict[str, Any]:
        """End an unfinished transfer or load; see `Reload.give_up`."""
        try:
            with foreign_code():
                self._rollbus_reload().give_up()
        except ForeignError as exc:
            logger.exception("weights.abandon_failed")
            return failed(ControlCode.HALF_WRITTEN, exc)
        return done()

    def rollbus_load_lora(self, name: str, number: int, path: str) -> dict[str, Any]:
        """Load an adapter, or replace the adapter of this number. After an error, the adapter's state is unknown."""
        from vllm.lora.request import LoRARequest

        worker: Any = self
        try:
            with foreign_code():
                if worker.add_lora(LoRARequest(name, number, path, load_inplace=True)):
                    return done()
        except ForeignError as exc:
            logger.exception("lora.load_failed name=%s", name)
            return failed(ControlCode.ENGINE_ERROR, exc)
        return failed(ControlCode.ENGINE_ERROR, "vLLM did not load the adapter and gave no reason")

    def rollbus_clear_nan(self) -> dict[str, Any]:
        """Replace NaN and infinities in the KV cache by zeros; see `clear_nan`."""
        worker: Any = self
        try:
            with foreign_code():
                clear_nan(worker.model_runner.kv_caches)
        except ForeignError as exc:
            # This release of vLLM may have another kind of KV cache.
            logger.exception("cache.nan_clear_failed")
            return failed(ControlCode.ENGINE_ERROR, exc)
        return done()

    def _rollbus_reload(self) -> Reload:
        """Return the one `Reload` of this worker. vLLM calls no constructor of a mixed-in class, so create it here."""
        reload: Reload | None = self.__dict__.get("_rollbus_reload_state")
        if reload is None:
            reload = self.__dict__["_rollbus_reload_state"] = Reload(self)
        return reload


OWN = f"{__name__}.{WorkerExtension.__name__}"


def extension_name(other: str | None) -> str:
    """Return the value of vLLM's `worker_extension_cls`.

    Args:
        other: the dotted name of the user's own class; None or empty: the user has none.
    """
    return OWN if not other else f"{OWN}{AND}{other.replace('.', DOT)}"


def is_ours(worker_extension_cls: str | None) -> bool:
    """Return True if a vLLM with this `worker_extension_cls` belongs to a rollbus worker.

    All processes of the engine have this setting.
    """
    return worker_extension_cls is not None and worker_extension_cls.partition(AND)[0] == OWN


def __getattr__(name: str) -> Any:
    own, separator, other = name.partition(AND)
    if own != WorkerExtension.__name__ or not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return type(name, (WorkerExtension, resolve_obj_by_qualname(other.replace(DOT, "."))), {})
