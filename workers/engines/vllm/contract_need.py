"""An entry of the contract with vLLM, the releases that it holds for, and whether calls fit; see `contract`."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

__all__ = ["FIRST", "PAST", "Need", "call_gap", "override_gap"]

P = inspect.Parameter
FIRST, PAST = (0, 30), (0, 34)
"""The contract holds for releases from the first on, and is proven for those before the second."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the adapter uses of one name in one module.

    A call is written as the adapter makes it: the names of what it gives by position, in vLLM's order, and behind `*`
    what it gives by keyword. vLLM may take more, if it asks for no more.
    """

    where: str
    """A module, or as `module:name` a function, a class or a value in it."""
    _: KW_ONLY
    has: str = ""
    """Attributes, fields and methods of the class."""
    call: str | None = None
    """How the function or class itself is called."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """How methods of the class are called, without self."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Methods that the adapter implements: exactly the parameters that vLLM gives them. No other one is abstract."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """By method, or empty for the name itself, a text that stands in its source exactly once."""
    since: tuple[int, int] = FIRST
    until: tuple[int, int] = (sys.maxsize, 0)
    """The first release that has it no more."""

    @property
    def module(self) -> str:
        """The module."""
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        """The name in it; empty: only the module itself."""
        return self.where.partition(":")[2]


def call_gap(call: str, signature: inspect.Signature) -> str | None:
    """Why a call like this cannot be made; None: it can.

    Args:
        call: names given by position, and behind `*` by keyword.
        signature: without self.
    """
    before, _, behind = call.partition("*")
    by_position, by_keyword = before.split(), behind.split()
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is P.VAR_POSITIONAL for one in parameters)
    found = [one.name for one in positional][: len(by_position)]
    if found != by_position[: len(found)] or (len(found) < len(by_position) and not takes_any):
        return f"takes ({', '.join(found)}) by position, and the adapter gives ({', '.join(by_position)})"
    takes_any_name = any(one.kind is P.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)}
    for name in by_keyword:
        if name not in names and not takes_any_name:
            return f"takes no {name!r}"
    for one in parameters:
        is_given = one.name in {*by_position, *by_keyword}
        if one.default is P.empty and one.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD) and not is_given:
            return f"asks for {one.name!r}, which the adapter does not give"
    return None


def override_gap(parameters: str, signature: inspect.Signature) -> str | None:
    """Why a method with these parameters does not stand for one of vLLM's; None: it does."""
    marks: dict[Any, str] = {P.VAR_POSITIONAL: "*", P.VAR_KEYWORD: "**"}
    found = " ".join(marks.get(one.kind, "") + one.name for one in signature.parameters.values())
    return None if found == parameters else f"is given ({found}), and the adapter takes ({parameters})"
