"""Command lines of `rollbus` that no test runs: those of containers, units and documentation name what exists."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbus.frontend.cli.app import build_parser
from tests.docs.blocks import read_blocks
from tests.support.processes import FOLDERS, ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SCRIPTS = ROOT / "deploy/docker"
DOCKERFILE = (SCRIPTS / "Dockerfile").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATORS = "|&;<>"
"""Characters of the shell that end a command."""


def with_values(text: str) -> str:
    """Return shell code or a value of compose in which each variable has its default, or an empty JSON object."""
    text = re.sub(r"\$\{\w+:\+(.*?)\} ", r"\1 ", text.replace('"$@"', ""))
    return re.sub(r"\$\{\w+:-([^}]*)\}|\$\{?\w+\}?", lambda match: match[1] or "{}", text)


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words after `rollbus` of each such command in shell code."""
    for line in text.replace("\\\n", " ").splitlines():
        split = shlex.shlex(re.sub(r"\d>(&\d)?", ">", line), posix=True, punctuation_chars=OPERATORS)
        split.whitespace_split = True
        try:
            words = list(split)
        except ValueError:
            continue  # a part of a string of several lines
        starts = [number for number, word in enumerate(words[:-1], 1) if re.fullmatch(r"(.*/bin/)?rollbus", word)]
        if starts and words[0] != "nats":  # where rollbus is the name of a bucket
            yield list(itertools.takewhile(lambda word: word[0:1] not in [*OPERATORS], words[starts[0] :]))


def of_container(service: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command lines of `rollbus` that the container of a service runs."""
    stage = DOCKERFILE.partition(f" AS {service['build']['target']}\n")[2].partition("\nFROM ")[0]
    image = re.findall(r"^ENTRYPOINT \[(.+)\]$", stage, re.MULTILINE)[-1]
    program, *arguments = service.get("entrypoint") or yaml.safe_load(f"[{image}]")
    arguments += [with_values(word) for word in service.get("command", ())]
    if program == "rollbus":
        yield arguments
    else:
        script = list(commands_in(with_values((SCRIPTS / program).read_text())))
        yield from ([*words, *arguments] for words in script)


def documented(page: Path) -> Iterator[list[str]]:
    """Yield the command lines of `rollbus` in the blocks of a page."""
    for block in read_blocks(page):
        if block.language == "sh":
            yield from commands_in(block.text)


def does_parse(words: list[str]) -> bool:
    """Return True if the command and all its options exist, with values that they allow."""
    try:
        build_parser().parse_args(words)
    except SystemExit as end:
        return end.code == 0  # --help and --version
    return True


@pytest.mark.parametrize("name", sorted(name for name, each in COMPOSE["services"].items() if "build" in each))
def test_the_command_of_each_container_exists(name: str) -> None:
    """Entry point, script and arguments of each container together are command lines that parse."""
    lines = list(of_container(COMPOSE["services"][name]))

    assert lines
    assert [shlex.join(words) for words in lines if not does_parse(words)] == []


def test_the_variables_of_containers_are_read() -> None:
    """A program or a script of an image reads each ROLLBUS variable that compose.yaml sets in a container."""
    variables = {
        variable
        for service in COMPOSE["services"].values()
        for variable in service.get("environment", ())
        if variable.startswith("ROLLBUS_")
    }
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")] + list(SCRIPTS.iterdir())
    text = "\n".join(path.read_text() for path in files if path.name != "Dockerfile")

    assert variables
    assert {variable for variable in variables if not re.search(rf"\b{variable}\b", text)} == set()


def test_compose_names_only_files_that_exist() -> None:
    """Each file and directory of the repository that compose.yaml mounts, copies or builds from exists."""
    services = COMPOSE["services"].values()
    names = [config["file"] for config in COMPOSE["configs"].values() if "file" in config]
    names += [service["build"]["dockerfile"] for service in services if "build" in service]
    mounts = [line.split(":")[0] for service in services for line in service.get("volumes", ())]
    names += [mount for mount in mounts if mount.startswith(".")]

    assert len(names) > 5
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_documented_commands_exist(page: Path) -> None:
    """Each command line of `rollbus` in a code block parses."""
    assert [shlex.join(words) for words in documented(page) if not does_parse(words)] == []


@pytest.mark.parametrize(
    "line", ["auth certify f --dir d", "auth certify --dir d f", "auth --dir d certify f", "auth --dir=d certify -v f"]
)
def test_arguments_may_follow_options(line: str) -> None:
    """An argument that may be omitted has the same value before and after an option."""
    args = build_parser().parse_args(line.split())

    assert (args.action, args.files, args.dir) == ("certify", [Path("f")], Path("d"))
    assert build_parser().parse_args(["auth", "init", "--dir", "d"]).files == []
