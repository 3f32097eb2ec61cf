"""A message bus over NATS between RL trainers and a fleet of vLLM workers.

    import rollbus

    async with rollbus.connect("nats://127.0.0.1:4222") as rb:
        generation = await rb.complete(rollbus.GenerateRequest(prompt_token_ids=[1, 2, 3]))

`rollbus.sync` has the same client without asyncio. The packages of `rollbus` are `rollbus.bus`, `rollbus.frontend`,
`rollbus.integrations`, `rollbus.schemas`, `rollbus.trainer` and `rollbus.workers`. If `help(rollbus)` shows another
docstring, another package called `rollbus` comes first on your path.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_PARTS = {"bus", "examples", "frontend", "integrations", "schemas", "trainer", "workers"}
"""Packages in this folder. Python looks up an attribute of the same name before it imports one of them."""

if TYPE_CHECKING:
    from . import sync as sync
    from .bus.api import *  # noqa: F403

    __all__: list[str]
else:

    def __getattr__(name: str) -> object:
        """Import the client at the first use of one of its names; engines import other packages without it."""
        if name in {"ray", "sync"}:
            return import_module(f".{name}", __name__)
        if name not in _PARTS and (name == "__all__" or not name.startswith("_")):
            bus = import_module(".bus.api", __name__)
            if name == "__all__":
                return [*bus.__all__, "__version__"]
            if name in bus.__all__:
                found = globals()[name] = getattr(bus, name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__"), "sync"})


__version__ = "0.1.0"
