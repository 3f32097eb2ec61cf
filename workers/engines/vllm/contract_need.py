"""An entry of the contract with vLLM, the supported releases, and checks of calls; see `contract`."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

__all__ = ["FIRST", "PAST", "Need", "call_gap", "override_gap"]

P = inspect.Parameter
FIRST, PAST = (0, 30), (0, 34)
"""The contract holds for releases from `FIRST` on. It is tested for releases before `PAST`."""


@dataclass(frozen=True, slots=True)
class Need:
    """The parts of one name in one vLLM module that the adapter uses.

    A call lists the arguments as the adapter passes them: the names of positional arguments in vLLM's order, then after
    `*` the names of keyword arguments. vLLM may accept more arguments if it does not require them.
    """

    where: str
    """A module, or a function, class or value in it as `module:name`."""
    _: KW_ONLY
    has: str = ""
    """Attributes, fields and methods of the class."""
    call: str | None = None
    """Arguments with which the adapter calls the function or class itself."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """Arguments with which the adapter calls methods of the class, without self."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Methods that the adapter implements, with exactly the parameters that vLLM passes. No other method is abstract.
    """
    reads: Mapping[str, str] = field(default_factory=dict)
    """A text that occurs exactly once in the source, by method; an empty key means the name itself."""
    since: tuple[int, int] = FIRST
    until: tuple[int, int] = (sys.maxsize, 0)
    """First release that no longer has the name."""

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        """Name in the module; empty: the module itself."""
        return self.where.partition(":")[2]


def call_gap(call: str, signature: inspect.Signature) -> str | None:
    """Return why this call does not fit the signature; None: the call fits.

    Args:
        call: names of positional arguments, then after `*` names of keyword arguments.
        signature: the signature without self.
    """
    before, _, behind = call.partition("*")
    by_position, by_keyword = before.split(), behind.split()
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is P.VAR_POSITIONAL for one in parameters)
    found = [one.name for one in positional][: len(by_position)]
    if found != by_position[: len(found)] or (len(found) < len(by_position) and not takes_any):
        return f"has the positional parameters ({', '.join(found)}) but the adapter passes ({', '.join(by_position)})"
    takes_any_name = any(one.kind is P.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)}
    for name in by_keyword:
        if name not in names and not takes_any_name:
            return f"has no parameter {name!r}"
    for one in parameters:
        is_given = one.name in {*by_position, *by_keyword}
        if one.default is P.empty and one.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD) and not is_given:
            return f"requires {one.name!r}, which the adapter does not pass"
    return None


def override_gap(parameters: str, signature: inspect.Signature) -> str | None:
    """Return why a method with these parameters does not override vLLM's method; None: the method overrides it."""
    marks: dict[Any, str] = {P.VAR_POSITIONAL: "*", P.VAR_KEYWORD: "**"}
    found = " ".join(marks.get(one.kind, "") + one.name for one in signature.parameters.values())
    return None if found == parameters else f"has the parameters ({found}), but the adapter implements ({parameters})"
