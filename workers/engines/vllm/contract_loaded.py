"""Compares the imported modules of vLLM with the contract; see `contract`.

The imported modules can differ from their sources, because other code may have patched them.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .contract_need import Need, call_gap

__all__ = ["check_loaded"]

MISSING: Any = object()


def check_loaded(needs: Iterable[Need]) -> list[str]:
    """Return the gaps of imported modules, one short text each; skip modules that are not imported."""
    return list(dict.fromkeys(gap for need in needs if _is_imported(need.module) for gap in _gaps(need)))


def _is_imported(name: str) -> bool:
    """Return True if the module is imported completely; the thread of another engine may still be importing it."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and not getattr(spec, "_initializing", False)


def _gaps(need: Need) -> Iterator[str]:
    if not need.name:
        return
    # `import_module` waits while another thread imports the module, which is incomplete until then.
    found: Any = getattr(importlib.import_module(need.module), need.name, MISSING)
    whole = f"{need.module}.{need.name}"
    if found is MISSING:
        yield f"{need.module} has no {need.name!r}"
        return
    if need.call is not None:
        yield from _call_gaps(whole, need.call, found)
    fields = _fields(found)
    if fields:
        members = fields | set(dir(found))
        yield from (f"{whole} has no {name!r}" for name in need.has.split() if name not in members)
    for name, call in need.calls.items():
        method = getattr(found, name, MISSING)
        if method is MISSING:
            yield f"{whole} has no method {name!r}"
        elif isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
            yield from _call_gaps(f"{whole}.{name}", call, method)
        else:
            # Skip self.
            yield from _call_gaps(f"{whole}.{name}", call, method, num_skipped=1)
    yield from (f"{whole} has no method {name!r}" for name in need.overrides if not hasattr(found, name))


def _fields(found: Any) -> set[str]:
    """Return the fields of a struct, a dataclass or a named tuple. Of other classes only the methods are known."""
    if not isinstance(found, type):
        return set()
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return {*getattr(found, "__struct_fields__", ()), *getattr(found, "_fields", ())}


def _call_gaps(whole: str, call: str, found: Callable[..., Any], *, num_skipped: int = 0) -> Iterator[str]:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # The callable is a builtin or a replacement of a function.
        return
    kept = list(signature.parameters.values())[num_skipped:]
    gap = call_gap(call, signature.replace(parameters=kept))
    if gap:
        yield f"{whole} {gap}"
