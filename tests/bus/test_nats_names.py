"""The private names of nats-py that rollbus uses are in one list, and the installed release defines all of them."""

import ast
import importlib.metadata
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from rollbus.bus.nats.client import PatchedNatsClient
from rollbus.bus.nats.connection import Connection

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "workers", "frontend", "trainer", "schemas")
OWN = (PatchedNatsClient, Connection)
"""Classes of rollbus that inherit nats-py's names."""

PRIVATE_NAMES = {
    "_close": "(self, status: 'int', do_cbs: 'bool' = True) -> 'None'",
    "_current_server": "",
    "_error_cb": "",
    "_flush_pending": "(self, force_flush: 'bool' = False) -> 'Any'",
    "_flush_queue": "",
    "_flusher_task": "",
    "_max_payload": "",
    "_max_pending_size": "",
    "_pending": "",
    "_pending_data_size": "",
    "_pongs": "",
    "_process_connect_init": "(self) -> 'None'",
    "_process_err": "(self, err_msg: 'str') -> 'None'",
    "_process_headers": "(self, headers) -> 'Optional[Dict[str, str]]'",
    "_process_info": "(self, info: 'Dict[str, Any]', initial_connection: 'bool' = False) -> 'None'",
    "_process_msg": "(self, sid: 'int', subject: 'bytes', reply: 'bytes', data: 'bytes', headers: 'bytes') -> 'None'",
    "_process_op_err": "(self, e: 'Exception') -> 'None'",
    "_process_pong": "(self) -> 'None'",
    "_ps": "",
    "_public_nkey": "",
    "_read_loop": "(self) -> 'None'",
    "_resp_map": "",
    "_send_ping": "(self, future: 'Optional[asyncio.Future]' = None) -> 'None'",
    "_send_subscribe": "(self, sub: 'Subscription') -> 'None'",
    "_server_info": "",
    "_server_pool": "",
    "_sid": "",
    "_status": "",
    "_subs": "",
    "_transport": "",
}
"""The private names of nats-py on which rollbus depends, with their signatures. An attribute has no
signature, so its value is an empty string.

Procedure for a new release of nats-py: install it, run this file, read the changes of the reported names, then raise
the upper bound in pyproject.toml.
"""


def names_of_nats() -> set[str]:
    """Return every private name that nats-py defines."""
    files = Path(inspect.getfile(nats)).parent.rglob("*.py")
    return {name for path in files for name in _defined_below(ast.parse(path.read_text()))}


def names_of_client() -> set[str]:
    """Return the private names of nats-py's `Client`, which the classes of rollbus inherit."""
    tree = ast.parse(Path(inspect.getfile(Client)).read_text())
    [client] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Client"]
    return _defined_below(client)


def _defined_below(tree: ast.AST) -> set[str]:
    """Return private functions and assigned private attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    """Return True if the name begins with exactly one underscore."""
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.Module) -> set[str]:
    """Return the names of functions, variables and own attributes that a module defines."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def used_names() -> set[str]:
    """Return the private names of nats-py that the code of rollbus uses.

    In a class that inherits from nats-py, each private name of nats-py counts as used, even if it is only assigned,
    because the assignment would replace nats-py's attribute. In other code, a name counts if its module does not define
    it.
    """
    of_nats, of_client = names_of_nats(), names_of_client()
    own_classes = {own.__name__ for own in OWN}
    found: set[str] = set()
    for path in [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        inheriting = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in own_classes]
        found |= {name for node in inheriting for name in _names_in(node)} & of_client
        if _imports_nats(tree):
            outside = {name for node in tree.body if node not in inheriting for name in _names_in(node)}
            found |= (outside - defined_in(tree)) & of_nats
    return found


def _names_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if is_private(name):
                    yield name


def _imports_nats(tree: ast.Module) -> bool:
    """Return True if a module can have an object of nats-py: it imports such names or the connection."""
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = ("connection", "library")
    return any(module.split(".")[-1] in ours for module in modules)


def signature_of(name: str) -> str:
    """Return the signature of a method of nats-py, or an empty string for an attribute or an unknown name."""
    method = getattr(Client, name, None) or getattr(Subscription, name, None)
    return str(inspect.signature(method)) if inspect.isfunction(method) else ""


def test_the_list_equals_the_names_that_the_code_uses() -> None:
    """The code uses no name outside the list, and the list has no unused name."""
    assert used_names() == set(PRIVATE_NAMES)


def test_the_installed_release_has_every_name() -> None:
    """The installed release defines every name with an unchanged signature."""
    assert set(PRIVATE_NAMES) <= names_of_nats()
    assert {name: signature_of(name) for name in PRIVATE_NAMES} == PRIVATE_NAMES


def test_pip_installs_only_the_verified_release() -> None:
    """The dependency allows only the verified minor release, because the next one may change names.

    The lock file is within it.
    """
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = [one for one in project["dependencies"] if one.startswith("nats-py")]
    major, minor, *_ = importlib.metadata.version("nats-py").split(".")
    locked = [
        line for line in (ROOT / "requirements-cpu.lock").read_text().splitlines() if line.startswith("nats-py==")
    ]

    assert requirement == f"nats-py>={major}.{minor},<{major}.{int(minor) + 1}"
    assert [line.split()[0].startswith(f"nats-py=={major}.{minor}.") for line in locked] == [True]
