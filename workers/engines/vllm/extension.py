"""What is added to vLLM's worker class, which lives in the engine's processes: methods that `Calls.on_workers` calls.

vLLM takes the name of one class for that (`worker_extension_cls`). Where the user gives one too, vLLM gets the name of
a class that is both, which this module makes up when it is asked for: `extension_name` says how it is called.
"""

from typing import Any

from workers.engines.vllm.reloading import Reload

__all__ = ["WorkerExtension", "extension_name"]

AND = "+"
DOT = ":"
"""Stands for the dots of the user's class, as vLLM takes what is behind the last dot for the name of a class."""


class WorkerExtension:
    """The methods; their names clash with none of vLLM's."""

    def rollbus_load_weights(self, path: str) -> dict[str, Any]:
        """Replace all weights by those in the folder `path`; see `Reload.load`."""
        return self._rollbus_reload().load(path)

    def rollbus_begin_reload(self) -> None:
        """Weights are about to come by other ways than `rollbus_load_weights`."""
        self._rollbus_reload().begin()

    def rollbus_end_reload(self) -> None:
        """All of them have come."""
        self._rollbus_reload().end()

    def rollbus_give_up_reload(self) -> None:
        """No more will come."""
        self._rollbus_reload().give_up()

    def _rollbus_reload(self) -> Reload:
        """The one object for this worker; a mixed-in class has no constructor that vLLM would call."""
        reload: Reload | None = self.__dict__.get("_rollbus_reload_state")
        if reload is None:
            reload = self.__dict__["_rollbus_reload_state"] = Reload(self)
        return reload


def extension_name(other: str | None) -> str:
    """What to give vLLM as `worker_extension_cls`.

    Args:
        other: the dotted name of the user's own class.
    """
    own = f"{__name__}.{WorkerExtension.__name__}"
    return own if not other else f"{own}{AND}{other.replace('.', DOT)}"


def __getattr__(name: str) -> Any:
    own, separator, other = name.partition(AND)
    if own != WorkerExtension.__name__ or not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return type(name, (WorkerExtension, resolve_obj_by_qualname(other.replace(DOT, "."))), {})
