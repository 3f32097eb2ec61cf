"""Modules of rollbus are imported under `rollbus`, and each text that names a module names an existing module."""

import ast
import asyncio
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rollbus
import rollbus.bus
from rollbus.bus.tracing import names as attribute_names
from tests.support.processes import FOLDERS, ROOT, misnamed
from tests.support.waits import SOON_S

SOURCE = ROOT / "src"
IMPORTED = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
"""A line of `python -X importtime`."""
DOTTED = re.compile(rf"(?:rollbus|{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w*)+")
COMMAND = re.compile(r"(?<!\w)-m ([\w.]+)")
# Only files with such a text are parsed: a string in them may be a dotted name of rollbus or the option `-m`.
MAY_NAME_A_MODULE = re.compile(rf"""["'](?:-m["']|(?:rollbus|{"|".join(FOLDERS)})\.)""")
TEXTS = ("*.md", "*.yaml", "*.yml", "*.json", "Makefile", "deploy/docker/*", "tests/docker/*", ".ci/*")


def tracked(*patterns: str) -> list[Path]:
    """Return the matching files of the repository, except recorded messages and results."""
    left_out = (":!tests/golden/v1", ":!bench/results", ":!src/rollbus/*/**")
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns, *left_out], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def names_a_module(name: str) -> bool:
    """Return True if a dotted name is a module of rollbus or a name that a module binds; import nothing."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            rest = parts[length:]
            return not rest or rest[0] in bound_in(file)
    return False


@cache
def bound_in(file: Path) -> set[str]:
    """Return the names that a module binds, except names inside functions and classes."""
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


def module_names_in_python(file: Path) -> Iterator[str]:
    """Yield the strings of a program that are dotted names of rollbus, and the modules that it runs with `-m`."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)) if MAY_NAME_A_MODULE.search(text) else ():
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
def test_rollbus_has_the_names_of_rollbus_bus() -> None:
    """`rollbus` has the names of `rollbus.bus` and its version; it imports the client only on first use."""
    code = "import rollbus, rollbus.schemas.limits, sys; print('rollbus.bus' in sys.modules, 'nats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(rollbus.__all__) == {*rollbus.bus.__all__, "__version__"}
    assert all(getattr(rollbus, name) is getattr(rollbus.bus, name) for name in rollbus.bus.__all__)
    assert set(rollbus.__all__) <= set(dir(rollbus))
    with pytest.raises(AttributeError, match="module 'rollbus' has no attribute 'conect'"):
        _ = rollbus.conect  # type: ignore[attr-defined]
    assert done.stdout.split() == ["False", "False"]


def test_tests_import_nothing_under_a_second_name() -> None:
    """No collected test has imported a module of rollbus under a name such as `bus` or `workers.worker`."""
    assert misnamed() == []


@pytest.mark.slow
def test_programs_import_rollbus_and_packages_import_relatively() -> None:
    """Files in the packages import each other relatively; other files import only names below `rollbus`."""
    wrong = []
    for file in tracked("*.py"):
        banned = {"rollbus"} if file.relative_to(ROOT).parts[0] in FOLDERS else set(FOLDERS)
        text = file.read_text()
        # Most files need no parser: no line with an import has a banned name that is not part of a dotted one.
        suspect = re.search(rf"^\s*(?:from|import)\s(?:.*[\s,])?(?:{'|'.join(banned)})\b", text, re.MULTILINE)
        for node in ast.walk(ast.parse(text)) if suspect else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            wrong += [f"{file.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] in banned]

    assert wrong == []


def test_packages_find_data_files_with_importlib_resources() -> None:
    """Packages find their data files with importlib.resources.

    A path that is resolved in a checkout would leave the package.
    """
    files = [file for file in tracked("*.py") if file.relative_to(ROOT).parts[0] in FOLDERS]

    assert [str(file) for file in files if "Path(__file__)" in file.read_text()] == []


async def test_a_worker_imports_nothing_under_a_second_name(nats_url: str, fleet: str) -> None:
    """A worker process imports no module under a name such as `bus` or `schemas`."""
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
def test_every_module_name_in_a_string_is_an_existing_module() -> None:
    """Each module name in programs, in commands with `-m`, and in entry points is an existing module."""
    programs = [file for file in tracked("*.py") if file != Path(__file__)]
    said = [(file, name) for file in programs for name in module_names_in_python(file)]
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

    # Span attributes have the same form as module names.
    attributes = {getattr(attribute_names, name) for name in filter(str.isupper, vars(attribute_names))}
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
