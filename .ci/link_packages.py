"""Give a new environment the packages that another one has at the version that a lock names, as hard links.

    VENV/bin/python .ci/link_packages.py FROM LOCK

Nothing is downloaded or copied twice: torch and its kin are most of an environment. pip then takes these packages for
installed, and replaces a file of theirs by a new one, never in place. Their commands in `bin` are left out: these begin
with the path of their environment. A package with another file there, as `uv` is, is left to pip. Where the folders lie
on two file systems, files are copied.
"""

import os
import re
import shutil
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path


def is_linkable(found: Distribution) -> bool:
    """Say whether all of a package lies in `site-packages`, but for its commands."""
    commands = {command.name for command in found.entry_points}
    return all(".." not in file.parts or file.name in commands for file in found.files or ())


def link(found: Distribution, source: Path, target: Path) -> None:
    """Link the files of a package that lie below `source`."""
    for file in found.files or ():
        old, new = source / file, target / file
        if ".." in file.parts or not old.is_file() or new.exists():
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)


def main() -> int:
    """Link what is the same in both; returns 0 also where there is nothing."""
    source = Path(sys.argv[1], "lib", "python3.11", "site-packages")
    wanted = {line.strip() for line in Path(sys.argv[2]).read_text().splitlines() if "==" in line}
    count = 0
    for found in distributions(path=[str(source)]):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        if f"{name}=={found.version}" in wanted and is_linkable(found):
            link(found, source, Path(sysconfig.get_path("purelib")))
            count += 1
    sys.stdout.write(f"  {count} packages are those of {sys.argv[1]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
