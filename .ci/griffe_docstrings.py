"""Extension of griffe: docstrings that the source derives from other texts.

The methods of `rollbus.sync` are made by `_blocking(Fleet.pause)`. The error codes are explained in `ERRORS`.
"""

from typing import Any

import griffe

from rollbus.schemas.errors import ERRORS, ErrorCode


class DerivedDocstrings(griffe.Extension):
    """Gives methods of `rollbus.sync` and members of `ErrorCode` their docstrings."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Set the docstring of a blocking method, whose value is a call, or of an error code."""
        if text := blocking_text(attr):
            attr.value = None
            attr.labels.add("method")
        else:
            text = code_text(attr)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)


def blocking_text(attr: griffe.Attribute) -> str:
    """Return the docstring of an attribute whose value is a call of `_blocking` or `_with_blocking`, or nothing."""
    value = attr.value
    if not isinstance(value, griffe.ExprCall):
        return ""
    if str(value.function) == "_blocking":
        shown = f"[`{value.arguments[0]}`][rollbus.{value.arguments[0]}]"
        return f"Block until {shown} returns. Arguments, result and errors are those of that method."
    if str(value.function) == "_with_blocking":
        return "Return a `BlockingClient`. Arguments and errors are those of [`rollbus.connect`][rollbus.connect]."
    return ""


def code_text(attr: griffe.Attribute) -> str:
    """Return the meaning of a member of `ErrorCode` and whether a retry can succeed, or nothing."""
    if attr.parent is None or attr.parent.name != "ErrorCode" or attr.name not in ErrorCode.__members__:
        return ""
    facts = ERRORS[ErrorCode[attr.name]]
    retry = "A retry may succeed." if facts.retryable else "A retry fails again."
    return f"{facts.meaning[0].upper()}{facts.meaning[1:]}. {retry}"
