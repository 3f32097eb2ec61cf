"""Where this process found rollbus."""

from importlib.resources import files
from pathlib import Path
from typing import Final

__all__ = ["EXAMPLES_DIR", "PACKAGE"]

PACKAGE: Final = Path(str(files(__name__.partition(".")[0])))
"""The folder `rollbus`, unresolved: its parts are links in a checkout, and behind them nothing is called `rollbus`."""
EXAMPLES_DIR: Final = PACKAGE / "examples"
