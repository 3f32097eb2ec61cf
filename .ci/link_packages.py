"""Create hard links in a new environment to packages of another environment, if their versions are those of a lock.

    VENV/bin/python .ci/link_packages.py FROM LOCK

The links save a second download and copy of torch and other large packages. pip treats linked packages as installed. It
replaces a file by a new file and never changes it in place, so the other environment stays unchanged. Commands in `bin`
are left out, because they begin with the path of their environment. pip installs a package that has other files outside
of `site-packages`, for example `uv`. If the folders are on two file systems, files are copied.
"""

import os
import re
import shutil
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path


def is_linkable(found: Distribution) -> bool:
    """Return True if all files of a package except its commands are in `site-packages`."""
    commands = {command.name for command in found.entry_points}
    return all(".." not in file.parts or file.name in commands for file in found.files or ())


def link(found: Distribution, source: Path, target: Path) -> None:
    """Link the files of a package that are below `source`."""
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
    """Link the packages that the other environment and the lock have at the same version. Return 0."""
    source = Path(sys.argv[1], "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    wanted = {line.strip() for line in Path(sys.argv[2]).read_text().splitlines() if "==" in line}
    count = 0
    for found in distributions(path=[str(source)]):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        if f"{name}=={found.version}" in wanted and is_linkable(found):
            link(found, source, Path(sysconfig.get_path("purelib")))
            count += 1
    sys.stdout.write(f"  {count} packages are links to {sys.argv[1]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
