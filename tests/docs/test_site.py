"""The site: strict, searchable, and complete without a network."""

import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

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
"""Elements that make a browser load something, and the attribute with its address."""


class _Assets(HTMLParser):
    """Collects the addresses that a page makes a browser load."""

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
    """The folder of a strict build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if not line.startswith("INFO"))
    return folder


def test_search_has_every_page_and_works_without_a_server(site: Path) -> None:
    """The search index has each page but those of sources, and is also a script, which a page from disk may load."""
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


@pytest.mark.parametrize("name", ["rollbus", "rollbus.sync", "rollbus.trainer"])
def test_every_public_name_is_in_the_reference(site: Path, name: str) -> None:
    """Each name of a module's `__all__` has an entry with a text on a page of the API reference."""
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    public = set(importlib.import_module(name).__all__) - {"__version__"}
    entries = dict(
        re.findall(
            r'id="(rollbus\.[\w.]+)" class="doc doc-heading">(.*?)(?=class="doc doc-heading"|\Z)', pages, re.DOTALL
        )
    )
    lacking = {
        item
        for item in public
        if not any("<p>" in entries.get(f"{name}.{path}", "") for path in (item, f"{item}.{item}"))
    }

    assert lacking == set()
