"""The folder from which this process imported rollbus."""

from importlib.resources import files
from pathlib import Path
from typing import Final

__all__ = ["EXAMPLES_DIR", "PACKAGE"]

PACKAGE: Final = Path(str(files(__name__.partition(".")[0])))
"""The folder `rollbus`. Its links are not resolved: in a checkout its entries link to folders outside of `rollbus`."""
EXAMPLES_DIR: Final = PACKAGE / "examples"
