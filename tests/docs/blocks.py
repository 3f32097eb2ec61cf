"""The code blocks of a page in docs/guides or docs/operate, and a script that runs them."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT

RUN = ("sh", "python")
NOT_RUN = ("text", "json", "yaml", "toml", "ini", "promql", "mermaid")
NEEDS = (".needs-gpu", ".needs-docker", ".needs-kubernetes", ".needs-cluster", ".needs-network")
"""Attributes of blocks that cannot run on a CI machine, each with the missing requirement."""
BACKGROUND = ".background"
SHARED_UP = ".venv/bin/rollbus up"
"""All pages share one `rollbus up`, so a background block that begins with this command is not run."""
TRAINERS = "guides/trainers"
"""Guides of packages that are installed in environments of their own, so that a test runs few of their blocks."""
FOLDERS = ("guides", TRAINERS, "operate")
COPIED = ("examples", "deploy")
"""Copied folders, into which a block may write. All other folders are links."""
FENCE = re.compile(r"^```(?P<language>[^\s`{]*) ?(?:\{(?P<attributes>[^}]*)\})?$")


@dataclass(frozen=True)
class Block:
    """A fenced block with its first line, language, attributes and text."""

    page: str
    line: int
    language: str
    attributes: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        """The page and the line in the form `page:line`, which editors open."""
        return f"{self.page}:{self.line}"

    @property
    def faults(self) -> list[str]:
        """The violations of the convention in this block."""
        found = []
        if self.language not in (*RUN, *NOT_RUN):
            found.append(f"{self.place}: the language {self.language!r} is none of {', '.join((*RUN, *NOT_RUN))}")
        found += [
            f"{self.place}: the attribute {each!r} is none of {', '.join((BACKGROUND, *NEEDS))}"
            for each in self.attributes
            if each not in (BACKGROUND, *NEEDS)
        ]
        if self.attributes and self.language not in RUN:
            found.append(f"{self.place}: a block that is not run has no attributes")
        return found

    @property
    def is_background(self) -> bool:
        """True if the block runs in the background while later blocks run."""
        return BACKGROUND in self.attributes

    @property
    def is_run(self) -> bool:
        """True if the block can run on a CI machine."""
        return self.language in RUN and not set(self.attributes) & set(NEEDS)


def pages() -> list[Path]:
    """Return the pages whose blocks follow the convention."""
    return [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in their order; raise `AssertionError` for a fence without an end."""
    blocks: list[Block] = []
    opened: tuple[int, str, tuple[str, ...]] | None = None
    text: list[str] = []
    name = str(page.relative_to(ROOT))
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if opened is None:
            if line.lstrip().startswith("```"):
                fence = FENCE.match(line)
                assert fence, f"{name}:{number}: {line!r} begins no block: ```language {{.attribute}}"
                opened, text = (number, fence["language"], tuple((fence["attributes"] or "").split())), []
        elif line == "```":
            blocks.append(Block(name, *opened, "\n".join(text) + "\n"))
            opened = None
        else:
            text.append(line)
    if opened is not None:
        raise AssertionError(f"{name}:{opened[0]}: the block does not end")
    return blocks


def make_checkout(folder: Path, state: Path) -> None:
    """Make a folder like the repository's root, with `.venv` and with `state` as `.rollbus`.

    `.venv/ready` is new, so that `make` installs nothing.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder.mkdir()
    for name in sorted({line.split("/")[0] for line in listed.splitlines()}):
        if name in COPIED:
            shutil.copytree(ROOT / name, folder / name)
        else:
            (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != "ready":
            (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / "ready").touch()
    (folder / ".rollbus").symlink_to(state)


def page_script(blocks: list[Block], addresses: dict[str, str]) -> str:
    """Return a bash script that runs the blocks in their order and prints the place of each block first.

    The script replaces each address on the pages with the corresponding value of `addresses`.
    """
    lines = ["set -euo pipefail", "mkdir -p .blocks"]
    for block in blocks:
        if not block.is_run or (block.is_background and block.text.startswith(SHARED_UP)):
            continue
        text = block.text
        for ours, theirs in addresses.items():
            text = text.replace(ours, theirs)
        lines.append(f"echo {shlex.quote(f'=== {block.place}')}")
        if block.language == "python":
            program = f".blocks/{block.line}.py"
            lines += [f"cat > {program} <<'END OF THE BLOCK'", text + "END OF THE BLOCK"]
            text = f".venv/bin/python {program}\n"
        lines.append(f"{{\n{text}}} > .blocks/{block.line}.log 2>&1 &" if block.is_background else text)
    return "\n".join(lines) + "\n"
