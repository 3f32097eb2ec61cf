"""Modules of rollbus are imported as parts of `rollbus`, and a text that names a module names one that exists."""

import ast
import asyncio
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbus
import rollbus.bus
from rollbus.bus.tracing import names as attribute_names
from tests.support.one_name import FOLDERS, ROOT, misnamed
from tests.support.patience import SOON_S

SOURCE = ROOT / "src"
IMPORTED = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
"""A line of `python -X importtime`."""
DOTTED = re.compile(rf"(?:rollbus|{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w*)+")
COMMAND = re.compile(r"(?<!\w)-m ([\w.]+)")
TEXTS = ("*.md", "*.yaml", "*.yml", "*.json", "Makefile", "deploy/docker/*", "tests/docker/*", ".ci/*")


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, but for recorded bytes and figures."""
    left_out = (":!tests/golden/v1", ":!bench/results", ":!src/rollbus/*/**")
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns, *left_out], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def names_a_module(name: str) -> bool:
    """Say whether a dotted name is a module of ours, or a name that one binds; nothing is imported."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            rest = parts[length:]
            return not rest or rest[0] in bound_in(file)
    return False


def bound_in(file: Path) -> set[str]:
    """The names that a module has, but for those that are bound in blocks of functions and classes."""
    names: set[str] = set()
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    names.add(node.id)
                case ast.alias():
                    names.add(node.asname or node.name)
                case _:
                    pending.append(node)
    return names


def said_in_python(file: Path) -> Iterator[str]:
    """The strings of a program that are dotted names and begin as one of ours, and what it runs with `-m`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            first, *rest = node.value.split(".")
            # `workers.log` is a file.
            if first == "rollbus" or names_a_module(f"rollbus.{first}.{rest[0]}"):
                yield node.value
        words = getattr(node, "elts", None) or getattr(node, "args", None)
        said = [getattr(word, "value", None) for word in words] if isinstance(words, list) else []
        for option, name in itertools.pairwise(said):
            if option == "-m" and isinstance(name, str) and name.split(".")[0] in ("rollbus", *FOLDERS):
                yield name


@pytest.mark.slow
def test_what_bus_has_is_public() -> None:
    """`rollbus` has the names of `rollbus.bus`, and its version; the client is not imported before it is asked for."""
    code = "import rollbus, rollbus.schemas.limits, sys; print('rollbus.bus' in sys.modules, 'nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(rollbus.__all__) == {*rollbus.bus.__all__, "__version__"}
    assert all(getattr(rollbus, name) is getattr(rollbus.bus, name) for name in rollbus.bus.__all__)
    assert set(rollbus.__all__) <= set(dir(rollbus))
    with pytest.raises(AttributeError, match="module 'rollbus' has no attribute 'conect'"):
        _ = rollbus.conect  # type: ignore[attr-defined]
    assert done.stdout.split() == ["False", "False"]


def test_tests_import_nothing_under_a_second_name() -> None:
    """No module of ours was imported as `bus` or `workers.worker` by any test that was collected."""
    assert misnamed() == []


@pytest.mark.slow
def test_programs_import_us_as_rollbus_and_we_ourselves_relatively() -> None:
    """Inside our folders no import says `rollbus`, elsewhere none says `bus` or another part alone."""
    wrong = []
    for file in tracked("*.py"):
        banned = {"rollbus"} if file.relative_to(ROOT).parts[0] in FOLDERS else set(FOLDERS)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{file.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] in banned]

    assert wrong == []


def test_nothing_looks_for_files_beside_itself() -> None:
    """What comes with the package is found by importlib.resources; a path, resolved in a checkout, would leave it."""
    files = [file for file in tracked("*.py") if file.relative_to(ROOT).parts[0] in FOLDERS]

    assert [str(file) for file in files if "Path(__file__)" in file.read_text()] == []


@pytest.mark.slow
async def test_a_worker_imports_nothing_under_a_second_name(nats_url: str, fleet: str) -> None:
    """Of all that a worker's process imports, nothing is called `bus`, `schemas` or another part of ours alone."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "rollbus.workers", "--engine", "synthetic", "--listen-s", "0"),
        *("--nats", nats_url, "--fleet", fleet),
        stderr=asyncio.subprocess.PIPE,
    )
    log = ""
    try:
        async with asyncio.timeout(SOON_S):
            while "worker.serving" not in log:
                line = await worker.stderr.readline() if worker.stderr is not None else b""
                assert line, log[-2000:]
                log += line.decode()
    finally:
        worker.kill()
        await worker.wait()

    names = set(IMPORTED.findall(log))
    assert "rollbus.workers.worker" in names
    assert {name for name in names if name.split(".")[0] in FOLDERS} == set()


@pytest.mark.slow
def test_every_string_that_names_a_module_of_ours_names_one_that_is_there() -> None:
    """In programs, in what is run with `-m`, and in what the distribution tells others to import."""
    programs = [file for file in tracked("*.py") if file != Path(__file__)]
    said = [(file, name) for file in programs for name in said_in_python(file)]
    said += [
        (file, name)
        for file in [*programs, *tracked(*TEXTS)]
        for name in COMMAND.findall(file.read_text())
        if name.split(".")[0] in ("rollbus", *FOLDERS)
    ]
    logs = ROOT / "workers" / "engines" / "vllm" / "json_logs.json"
    said += [(logs, name) for name in DOTTED.findall(logs.read_text())]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = [*project["scripts"].values(), *project["entry-points"]["vllm.general_plugins"].values()]
    said += [(ROOT / "pyproject.toml", point.replace(":", ".")) for point in points]

    # Attributes of spans have such names, too.
    attributes = {getattr(attribute_names, name) for name in attribute_names.__all__}
    wrong = [(file, name) for file, name in said if not names_a_module(name) and name not in attributes]

    assert [f"{file.relative_to(ROOT)}: {name}" for file, name in wrong] == []
    assert {
        "rollbus.frontend.cli.main",
        "rollbus.workers",
        "rollbus.workers.engines.vllm.extension.WorkerExtension",
        "rollbus.workers.engines.vllm.kv.connector",
        "rollbus.workers.engines.vllm.plugin.install",
        "rollbus.workers.engines.vllm.preloaded",
        "rollbus.bus.logs.JsonFormatter",
    } <= {name for _, name in said}
