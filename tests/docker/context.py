"""The context of `docker build` without Docker: the files that .dockerignore leaves, and what the Dockerfile copies."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import ROOT

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"


class Copy(NamedTuple):
    """One COPY of files from the context."""

    stage: str
    sources: tuple[str, ...]
    target: str


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Return True if the context leaves a file out: the last pattern that matches it or a parent directory decides."""
    parts = path.split("/")
    paths = ["/".join(parts[:number]) for number in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        if any(_expression(pattern.removeprefix("!")).fullmatch(each) for each in paths):
            ignored = not pattern.startswith("!")
    return ignored


def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern, with the rules of Go's `filepath.Match` and `**` for any directories."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(known.get(piece, re.escape(piece)) for piece in pieces))


def context_files() -> list[str]:
    """Return the files of the context, in a checkout that holds nothing else than git would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    return [path for path in listed if not is_ignored(path, patterns)]


def copies() -> list[Copy]:
    """Return each COPY of the Dockerfile that takes files from the context, in their order."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    found, stage = [], ""
    for line in text.splitlines():
        if line.startswith("FROM "):
            stage = line.rpartition(" AS ")[2]
        elif line.startswith("COPY ") and "--from=" not in line:
            *sources, target = shlex.split(line)[1:]
            found.append(Copy(stage, tuple(sources), target))
    return found


def copy_stage(stage: str, root: Path) -> None:
    """Copy what a stage copies from the context, to the same paths below `root`, as `docker build` does."""
    files = context_files()
    for copy in copies():
        for source in copy.sources if copy.stage == stage else ():
            for file in files:
                if file == source:
                    target = root / copy.target.strip("/") / (Path(file).name if copy.target.endswith("/") else "")
                elif file.startswith(f"{source}/"):
                    target = root / copy.target.strip("/") / Path(file).relative_to(source)
                else:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, target, follow_symlinks=False)
