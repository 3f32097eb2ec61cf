"""The structure of the repository: layers, file sizes, the lock file, and the light client."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.context import copy_stage

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("bus", "frontend", "integrations", "schemas", "trainer", "workers")
ROOT_ENTRIES = {
    *PACKAGES, "bench", "deploy", "docs", "examples", "src", "tests", ".ci", ".dockerignore", ".env.example",
    ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "compose.yaml",
    "mkdocs.yml", "pyproject.toml", "requirements-cpu.lock",
}  # fmt: skip
RAW_TASKS = {
    "bus/client/groups.py",
    "bus/client/thread.py",
    "bus/publish/publication.py",
}
"""Files whose tasks belong to an object or a thread and not to a block, so that no TaskGroup can own them."""
ELSEWHERE = ("nemo", "skyrl", "trl", "verifiers", "verl", "worker")
"""Extras for other environments: trainers and GPUs."""
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
HEAVY = ("aiohttp", "opentelemetry", "tokenizers", "torch", "transformers", "triton", "vllm")

# A client-only environment runs this probe, which imports each client module and prints the loaded heavy packages.
CLIENT_PROBE = f"""
import importlib, importlib.util, json, pkgutil, sys
import rollbus.bus, rollbus.schemas
for package in (rollbus.bus, rollbus.schemas):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "rollbus.bus.tracing.otel":
            importlib.import_module(module.name)
print(json.dumps({{
    "rollbus": rollbus.__file__,
    "loaded": [name for name in {HEAVY} if name in sys.modules],
    "installed": [name for name in {HEAVY} if importlib.util.find_spec(name)],
}}))
"""


def python_files(*folders: str) -> Iterator[Path]:
    """Yield each Python file below these folders of the repository."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Return all absolute names that a file of a package imports, also inside functions and `if TYPE_CHECKING`."""
    folder = ("rollbus", *path.relative_to(ROOT).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this environment's settings; return its stdout, or fail with its output."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        pytest.fail(
            f"{shown}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", pytrace=False
        )
    return done.stdout


@pytest.fixture(scope="session")
def client_bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install rollbus without extras into a fresh environment, as for a trainer; return its `bin` directory.

    The wheel is built from the files that the Dockerfile copies for the wheel of its images, and from no others.
    """
    folder = tmp_path_factory.mktemp("client")
    copy_stage("wheel", folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-compile", folder / "src", cwd=folder)
    return folder / "venv" / "bin"


@pytest.mark.proves("P32")
@pytest.mark.slow
def test_client_install_is_light(client_bin: Path, tmp_path: Path) -> None:
    """Without extras, bus and schemas can be imported, and no engine, model or trace library is installed."""
    probe = json.loads(run(client_bin / "python", "-I", "-c", CLIENT_PROBE, cwd=tmp_path))

    assert probe == {"rollbus": probe["rollbus"], "loaded": [], "installed": []}
    assert Path(probe["rollbus"]).is_relative_to(client_bin.parent)


@pytest.mark.slow
def test_client_install_has_the_command_and_the_integrations(client_bin: Path, tmp_path: Path) -> None:
    """Without extras, `rollbus --help` and `import rollbus.integrations` work."""
    assert "rollbus" in run(client_bin / "rollbus", "--help", cwd=tmp_path)
    run(client_bin / "python", "-I", "-c", "import rollbus.integrations", cwd=tmp_path)


def test_import_contracts_hold() -> None:
    """Each direct or indirect import obeys the layers in pyproject.toml."""
    report = run(Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache", cwd=ROOT)

    assert " 0 broken." in report


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("schemas", {"msgspec", "numpy", "rollbus.schemas"}),
        ("bus/protocol", {"msgspec", "numpy", "zstandard", "rollbus.bus.protocol", "rollbus.schemas"}),
    ],
)
def test_pure_packages_import_only_pure_packages_and_no_io_modules(folder: str, allowed: set[str]) -> None:
    """The packages schemas and bus.protocol import only these packages and the standard library without I/O modules."""
    allowed = allowed | (sys.stdlib_module_names - {"asyncio", "socket", "ssl", "subprocess", "threading"})
    strangers = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(folder)
        for name in imported_names(path)
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
    }

    assert strangers == set()


def test_files_and_functions_stay_short() -> None:
    """No file has more than 600 lines, and no function more than 100."""
    too_long = []
    for path in python_files(*PACKAGES, "bench", "examples", "tests", ".ci"):
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)) if lines > MAX_FUNCTION_LINES else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")

    assert too_long == []


def test_tasks_outside_of_a_task_group_are_in_a_few_files() -> None:
    """Each raw task (`loop.create_task`) is in a file of `RAW_TASKS`; all others live in a TaskGroup."""
    raw = re.compile(r"(?:get_running_loop\(\)|\bloop|_loop)\.create_task\(")
    found = {str(path.relative_to(ROOT)) for path in python_files(*PACKAGES) if raw.search(path.read_text())}

    assert found == RAW_TASKS


def test_root_stays_clean() -> None:
    """The root has only the packages, their support folders and a few well-known files."""
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()

    assert {name.split("/")[0] for name in tracked} - ROOT_ENTRIES == set()


def test_lock_is_exact_and_for_a_cpu() -> None:
    """Each line of the lock pins one version; torch is the CPU build, and no package requires CUDA."""
    lines = [line for line in (ROOT / "requirements-cpu.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(line.split("==") for line in lines)
    unwanted = re.compile(r"torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*")

    assert [line for line in lines if re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line) is None] == []
    assert [name for name in locked if unwanted.fullmatch(name)] == []
    assert locked["torch"].endswith("+cpu")


def test_lock_contains_each_dependency() -> None:
    """The lock contains each dependency of this environment; otherwise `make lock` is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    here = [items for name, items in extras.items() if name not in ELSEWHERE]
    wanted = [*project["dependencies"], *(item for items in here for item in items)]
    locked = {line.split("==")[0] for line in (ROOT / "requirements-cpu.lock").read_text().splitlines()}

    assert {re.split(r"[<>=!~\[]", item)[0] for item in wanted} - locked == set()


def test_the_package_has_a_py_typed_file() -> None:
    """The package has a py.typed file, so that type checkers read its annotations."""
    assert (ROOT / "src" / "rollbus" / "py.typed").is_file()
