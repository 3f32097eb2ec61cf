"""The transport of requests, chunks and presence, and the client that trainers use.

The public names are those of `api`. They are part of `rollbus` itself: `rollbus.connect`, `rollbus.GenerateRequest`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import *  # noqa: F403

    __all__: list[str]
else:

    def __getattr__(name: str) -> object:
        """Import the client at the first use of one of its names. Workers and commands need parts of this package."""
        if name == "__all__" or not name.startswith("_"):
            api = import_module(".api", __name__)
            if name == "__all__":
                return api.__all__
            if name in api.__all__:
                globals()[name] = getattr(api, name)
            # The import has also set the parts of this package that the client uses.
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
