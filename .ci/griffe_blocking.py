"""Extension of griffe: docstrings for the methods of `rollbus.sync`, which are made by `_blocking(Fleet.pause)`."""

from typing import Any

import griffe


class BlockingMethods(griffe.Extension):
    """Gives each attribute `name = _blocking(Class.name)` the docstring that refers to the awaited method."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Set the docstring of an attribute whose value is a call of `_blocking` or `_with_blocking`."""
        value = attr.value
        if not isinstance(value, griffe.ExprCall):
            return
        if str(value.function) == "_blocking":
            shown = f"[`{value.arguments[0]}`][rollbus.{value.arguments[0]}]"
            text = f"Block until {shown} returns. Arguments, result and errors are those of that method."
        elif str(value.function) == "_with_blocking":
            text = "Return a `BlockingClient`. Arguments and errors are those of [`rollbus.connect`][rollbus.connect]."
        else:
            return
        attr.docstring = griffe.Docstring(text, parent=attr)
        attr.value = None
        attr.labels.add("method")
