"""Reads vLLM's sources without importing them, and finds what they lack of the contract."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbus.workers.engines.vllm.names import numbers_of
from tests.engine.vllm_contract.contract import CONTRACT, Need

P = inspect.Parameter
Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_HOPS = 16
"""Maximum number of imports to follow until a name is defined."""


@dataclass(frozen=True)
class _Place:
    """The place where a name is defined."""

    module: str
    node: ast.AST


class ModuleSources:
    """The modules below the folder of the package `vllm`.

    Args:
        folder: folder of the package.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def gaps(self, need: Need) -> Iterator[str]:
        """Yield the gaps of one need, one short text each."""
        names = self._names(need.module)
        if names is None:
            yield f"there is no module {need.module}"
            return
        if not need.name:
            yield from (f"{need.module} has no {name!r}" for name in need.has.split() if name not in names)
            return
        whole = f"{need.module}.{need.name}"
        place = self._find(need.module, need.name)
        if place is None:
            yield f"{need.module} has no {need.name!r}"
        elif isinstance(place.node, ast.ClassDef):
            yield from _Class(self, place).gaps(need, whole)
        elif need.call is not None and isinstance(place.node, Function):
            gap = call_gap(need.call, _signature(place.node))
            if gap:
                yield f"{whole} {gap}"
        elif need.has or need.calls or need.overrides:
            yield f"{whole} is not a class"
        elif need.reads and self.text(place.module, place.node).count(need.reads[""]) != 1:
            yield f"{whole} is not {need.reads['']}"

    def text(self, module: str, node: ast.AST) -> str:
        """Return the source of `node`."""
        path = self._path(module)
        return "" if path is None else ast.get_source_segment(path.read_text(), node) or ""

    def mro(self, place: _Place) -> list[_Place]:
        """Return a class and its base classes in vLLM, the class itself first."""
        node = place.node
        found = [place]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                above = self._find(place.module, name.id)
                if above is not None and isinstance(above.node, ast.ClassDef):
                    found += self.mro(above)
        return found

    def _find(self, module: str, name: str) -> _Place | None:
        for _ in range(MAX_HOPS):
            names = self._names(module)
            node = None if names is None else names.get(name)
            if node is None:
                is_module = self._path(f"{module}.{name}") is not None
                return _Place(f"{module}.{name}", ast.Module([], [])) if is_module else None
            if not isinstance(node, ast.ImportFrom):
                return _Place(module, node)
            source = self._absolute(module, node)
            if not source.startswith("vllm"):
                return _Place(source, node)
            name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            module = source
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        parts = module.split(".")
        up = node.level - (path is not None and path.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def _path(self, module: str) -> Path | None:
        plain = self._folder.joinpath(*module.split(".")[1:])
        candidates = (plain / "__init__.py", plain.with_suffix(".py"))
        return next((path for path in candidates if path.is_file()), None)

    def _names(self, module: str) -> dict[str, ast.AST] | None:
        """Return the names bound at the top level of a module, also under conditions."""
        path = self._path(module)
        return None if path is None else _names_in(path.resolve())


@functools.cache
def _names_in(file: Path) -> dict[str, ast.AST]:
    """Return the names bound at the top level of a file, of which doctored releases share most by links."""
    return dict(_bound(ast.parse(file.read_text()).body))


class _Class:
    """One class with the members that it inherits from other classes of vLLM."""

    def __init__(self, sources: ModuleSources, place: _Place) -> None:
        self._sources = sources
        self._mro = sources.mro(place)

    def gaps(self, need: Need, whole: str) -> Iterator[str]:
        members = self._members
        yield from (f"{whole} has no {name!r}" for name in need.has.split() if name not in members)
        if need.call is not None:
            gap = call_gap(need.call, self._constructor())
            if gap:
                yield f"{whole} {gap}"
        for name, call in need.calls.items():
            yield from self._method_gaps(whole, name, call)
        for name, parameters in need.overrides.items():
            method = self._method(name)
            gap = "does not exist" if method is None else override_gap(parameters, _signature(method, is_method=True))
            if gap:
                yield f"{whole}.{name} {gap}"
        if need.overrides:
            abstract = {name for place in self._mro for name, node in _functions(place.node) if _is_abstract(node)}
            yield from (
                f"{whole} has the abstract method {name!r}, which the adapter does not implement"
                for name in sorted(abstract - {*need.overrides})
            )
        for name, text in need.reads.items():
            method = self._method(name)
            source = "" if method is None else self._sources.text(self._owner(method), method)
            if source.count(text) != 1:
                yield f"{whole}.{name} does not contain {text!r} exactly once"

    def _method_gaps(self, whole: str, name: str, call: str) -> Iterator[str]:
        method = self._method(name)
        if method is None:
            yield f"{whole} has no method {name!r}"
            return
        gap = call_gap(call, _signature(method, is_method=True))
        if gap:
            yield f"{whole}.{name} {gap}"

    @functools.cached_property
    def _members(self) -> set[str]:
        found: set[str] = set()
        for place in self._mro:
            for node in ast.walk(place.node):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                    found.add(node.attr)
            if isinstance(place.node, ast.ClassDef):
                found.update(name for name, _ in _bound(place.node.body))
        return found

    def _method(self, name: str) -> Function | None:
        # The last of several definitions in one class counts: the earlier ones are overloads for type checkers.
        defined = (dict(_functions(place.node)).get(name) for place in self._mro)
        return next((node for node in defined if node is not None), None)

    def _owner(self, method: Function) -> str:
        return next(place.module for place in self._mro if method in ast.walk(place.node))

    def _constructor(self) -> inspect.Signature:
        method = self._method("__init__")
        if method is not None:
            return _signature(method, is_method=True)
        # Fields of a dataclass, a struct or a named tuple: inherited fields come first.
        fields: dict[str, inspect.Parameter] = {}
        for place in reversed(self._mro):
            for node in place.node.body if isinstance(place.node, ast.ClassDef) else ():
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_class_var(node):
                    default = inspect.Parameter.empty if node.value is None else None
                    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                    fields[node.target.id] = inspect.Parameter(node.target.id, kind, default=default)
        # A struct may have fields without a default after fields with one. `Signature` rejects that order, so sort
        # them.
        return inspect.Signature(sorted(fields.values(), key=lambda one: one.default is None))


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((name.id, node) for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        else:
            for blocks in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, blocks, ()):
                    yield from _bound(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _functions(node: ast.AST) -> Iterator[tuple[str, Function]]:
    for name, found in _bound(node.body) if isinstance(node, ast.ClassDef) else ():
        if isinstance(found, Function):
            yield name, found


def _is_abstract(function: Function) -> bool:
    return any(isinstance(name, ast.Name) and name.id == "abstractmethod" for name in function.decorator_list)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_class_var(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def _signature(function: Function, *, is_method: bool = False) -> inspect.Signature:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    num_required = len(positional) - len(given.defaults)
    kinds = inspect.Parameter
    parameters = []
    for index, argument in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if index < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        default = kinds.empty if index < num_required else None
        parameters.append(kinds(argument.arg, kind, default=default))
    if given.vararg is not None:
        parameters.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if value is None else None))
    if given.kwarg is not None:
        parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    is_static = any(isinstance(name, ast.Name) and name.id == "staticmethod" for name in function.decorator_list)
    return inspect.Signature(parameters[is_method and not is_static :])


def call_gap(call: str, signature: inspect.Signature) -> str | None:
    """Return why this call does not fit the signature; None: the call fits.

    Args:
        call: names of positional arguments, then after `*` names of keyword arguments.
        signature: the signature without self.
    """
    before, _, behind = call.partition("*")
    by_position, by_keyword = before.split(), behind.split()
    parameters = list(signature.parameters.values())
    positional = [one for one in parameters if one.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is P.VAR_POSITIONAL for one in parameters)
    found = [one.name for one in positional][: len(by_position)]
    if found != by_position[: len(found)] or (len(found) < len(by_position) and not takes_any):
        return f"has the positional parameters ({', '.join(found)}) but the adapter passes ({', '.join(by_position)})"
    takes_any_name = any(one.kind is P.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)}
    for name in by_keyword:
        if name not in names and not takes_any_name:
            return f"has no parameter {name!r}"
    for one in parameters:
        is_given = one.name in {*by_position, *by_keyword}
        if one.default is P.empty and one.kind not in (P.VAR_POSITIONAL, P.VAR_KEYWORD) and not is_given:
            return f"requires {one.name!r}, which the adapter does not pass"
    return None


def override_gap(parameters: str, signature: inspect.Signature) -> str | None:
    """Return why a method with these parameters does not override vLLM's method; None: the method overrides it."""
    marks: dict[Any, str] = {P.VAR_POSITIONAL: "*", P.VAR_KEYWORD: "**"}
    found = " ".join(marks.get(one.kind, "") + one.name for one in signature.parameters.values())
    return None if found == parameters else f"has the parameters ({found}), but the adapter implements ({parameters})"


def release_in(folder: Path) -> str:
    """Return the release of the sources in the folder `vllm`, from their own version file."""
    text = (folder / "_version.py").read_text()
    found = re.search(r"""^(?:__version__ = )?version = ["']([^"']+)["']""", text, re.MULTILINE)
    assert found is not None, f"{folder / '_version.py'} does not state its vLLM release"
    return found[1]


def needs_of(release: str) -> list[Need]:
    """Return the needs of this release; a release newer than the contract has the needs of the newest known release."""
    return [need for need in CONTRACT if need.since <= numbers_of(release) < need.until]


def find_gaps(folder: Path) -> tuple[str, ...]:
    """Return the gaps between the sources in the folder `vllm` and the contract, one short text each."""
    sources = ModuleSources(folder)
    return tuple(dict.fromkeys(gap for need in needs_of(release_in(folder)) for gap in sources.gaps(need)))
