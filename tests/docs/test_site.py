"""The documentation site builds without warnings, has a search, and works without a network."""

import ast
import html
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from rollbus.bus.control import options as commands
from rollbus.bus.publish import options as arguments

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ASSETS = {
    "audio": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "script": "src",
    "source": "src",
    "video": "src",
}
"""Elements for which a browser loads a file, and the attribute with the file's address."""


OPTIONS = (
    *(commands.LoadOptions, commands.DrainOptions, commands.SendOptions),
    *(commands.SourceOptions, commands.VersionOptions),
    *(arguments.ConnectOptions, arguments.PublishSettings, arguments.AdapterSettings),
)
"""Types with the keyword options of the fleet's and the publisher's methods."""


def described(kind: type) -> dict[str, str]:
    """Return the options that a TypedDict adds to its base, each with its description."""
    (found,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(found, ast.ClassDef)
    options: dict[str, str] = {}
    for field, after in pairwise([*found.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    options[field.target.id] = text
                case _:
                    options[field.target.id] = ""
    return options


class _Assets(HTMLParser):
    """Collects the addresses that a browser would load for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in {"canonical", "next", "prev"}:
            return
        if tag in ASSETS and (address := values.get(ASSETS[tag])):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in strict mode; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    return folder


def test_search_has_every_page_and_works_without_a_server(site: Path) -> None:
    """The search index covers each page except source pages.

    It also exists as a script, which a page opened from disk can load.
    """
    index = json.loads((site / "search" / "search_index.json").read_text())
    searched = {entry["location"].split("#")[0] for entry in index["docs"]}
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html", "index.html"}

    assert {page for page in pages - searched if not page.startswith("source/")} == set()
    assert (site / "search" / "search_index.js").is_file()


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    """No script, style, font, picture or frame of a page has an address on another machine."""
    loaded: set[str] = set()
    for page in site.rglob("*.html"):
        parser = _Assets()
        parser.feed(page.read_text())
        loaded.update(parser.found)
    for style in site.rglob("*.css"):
        loaded.update(re.findall(r"url\([\"']?([^)\"']+)", style.read_text()))

    assert {address for address in loaded if re.match(r"(https?:)?//", address)} == set()


def test_every_diagram_is_drawn(site: Path) -> None:
    """Each Mermaid block of a page is an SVG with a unique id on the site."""
    for page in (ROOT / "docs").rglob("*.md"):
        blocks = page.read_text().count("```mermaid\n")
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        if blocks:
            assert len(set(re.findall(r'<svg id="(diagram-\d+)"', built.read_text()))) == blocks
            assert "stateDiagram-v2" not in built.read_text()


@pytest.mark.parametrize("name", ["rollbus", "rollbus.sync", "rollbus.trainer"])
def test_every_public_name_is_in_the_reference(site: Path, name: str) -> None:
    """Each name of a module's `__all__` has an entry with text on a page of the API reference."""
    pages = "\n".join(page.read_text() for page in (site / "api").glob("*.html"))
    public = set(importlib.import_module(name).__all__) - {"__version__"}
    heading = r'id="(rollbus\.[\w.]+)" class="doc doc-heading"'
    _, *parts = re.split(heading, pages)
    entries = dict(zip(parts[::2], parts[1::2], strict=True))
    lacking = {
        item
        for item in public
        if not any("<p>" in entries.get(f"{name}.{path}", "") for path in (item, f"{item}.{item}"))
    }

    assert lacking == set()


def test_every_option_is_in_the_reference(site: Path) -> None:
    """Each keyword option of a TypedDict is on an API page with its description, which states the default."""
    pages = "\n".join(page.read_text() for page in sorted((site / "api").glob("*.html")))
    shown = " ".join(html.unescape(re.sub(r"<[^>]*>", "", pages)).split())
    options = {f"{kind.__name__}.{name}": text for kind in OPTIONS for name, text in described(kind).items()}
    lacking = {name for name, text in options.items() if " ".join(text.replace("`", "").split()) not in shown}

    assert len(options) > 10
    assert [name for name, text in options.items() if "default" not in text.lower()] == []
    assert lacking == set()
