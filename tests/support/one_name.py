"""The names under which a process has imported files of this repository."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")
"""The packages of `rollbus`, at the top of the repository."""


def misnamed() -> list[str]:
    """Return modules of this process from one of `FOLDERS` whose name does not begin with `rollbus.`."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        # A program started with -m has the module name __main__; its spec has the real name.
        names = {spec.name if name == "__main__" and spec is not None else name}
        if file is not None and not all(known.startswith("rollbus.") for known in names):
            path = Path(file).resolve()
            if any(path.is_relative_to(ROOT / folder) for folder in FOLDERS):
                found.append(f"{name}: {file}")
    return sorted(found)
