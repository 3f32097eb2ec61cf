"""Compares those modules of vLLM that are imported with the contract; see `contract`.

Their sources may keep it and they may not: what runs is what they are, also after somebody has changed them.
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
    """What imported modules lack, each in a few words; what is not imported is passed over."""
    return list(dict.fromkeys(gap for need in needs if _is_imported(need.module) for gap in _gaps(need)))


def _is_imported(name: str) -> bool:
    """True if the module is imported to its end: another engine of this process may be importing it in its thread."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and not getattr(spec, "_initializing", False)


def _gaps(need: Need) -> Iterator[str]:
    if not need.name:
        return
    # Waits where another thread is importing it just now; half of it is there then.
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
            # Without self.
            yield from _call_gaps(f"{whole}.{name}", call, method, num_skipped=1)
    yield from (f"{whole} has no method {name!r}" for name in need.overrides if not hasattr(found, name))


def _fields(found: Any) -> set[str]:
    """Of a struct, a dataclass or a named tuple; of other classes only their methods are known."""
    if not isinstance(found, type):
        return set()
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return {*getattr(found, "__struct_fields__", ()), *getattr(found, "_fields", ())}


def _call_gaps(whole: str, call: str, found: Callable[..., Any], *, num_skipped: int = 0) -> Iterator[str]:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # Of a builtin, or something that stands for a function.
        return
    kept = list(signature.parameters.values())[num_skipped:]
    gap = call_gap(call, signature.replace(parameters=kept))
    if gap:
        yield f"{whole} {gap}"
