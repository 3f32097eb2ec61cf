"""The page at `/` and its files: public, equal for all users, and without connections to other hosts."""

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from rollbus.frontend.http import page
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.docs import document
from rollbus.frontend.http.page import HEADERS, POLICY, assets
from rollbus.frontend.http.settings import Settings
from tests.http.support import http_before

FOLDER = Path(str(files(page) / "assets"))
UPLOT = ("uplot.min.js", "uplot.min.css", "uplot.LICENSE.txt", "uplot.json")
OWN = {name: found.content.decode() for name, found in assets().items() if name not in UPLOT}
"""The texts of the files that belong to rollbus."""
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}


async def test_the_page_needs_no_token(nats_url: str, fleet: str) -> None:
    """The page needs no token, and its headers permit only its own files."""
    async with http_before(nats_url, fleet, Settings(token="data", admin_token="admin")) as http:
        answer = await http.client.get("/")
        head = await http.client.head("/")

    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.content == assets()["index.html"].content
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["ETag"] == answer.headers["ETag"]


def test_the_policy_allows_only_own_files() -> None:
    """The policy forbids inline code, `eval`, other hosts and frames.

    It isolates the page from windows of other sites.
    """
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in POLICY
    assert HEADERS["Cross-Origin-Opener-Policy"] == "same-origin"


async def test_every_file_is_served_with_its_type(nats_url: str, fleet: str) -> None:
    """Each file has its media type, because browsers refuse scripts of another type. A known ETag gives 304."""
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    async with http_before(nats_url, fleet) as http:
        for name, found in assets().items():
            answer = await http.client.get(f"/assets/{name}")
            assert (answer.status_code, answer.content) == (200, found.content), name
            assert {key: answer.headers[key] for key in HEADERS} == HEADERS
            if (end := name.rpartition(".")[2]) in types:
                assert answer.headers["Content-Type"].startswith(types[end])
            for known in (found.etag, f"W/{found.etag}", f'"other", {found.etag}', "*"):
                again = await http.client.get(f"/assets/{name}", headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["ETag"] == found.etag
            changed = await http.client.get(f"/assets/{name}", headers={"If-None-Match": '"other"'})
            assert changed.status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "__init__.py",
        "../__init__.py",
        "..%2f__init__.py",
        "%2e%2e/__init__.py",
        "%2e%2e%2f__init__.py",
        "..%5c__init__.py",
        "....//__init__.py",
        "%2fetc%2fpasswd",
        "main.js%00.css",
        "",
    ],
)
async def test_only_existing_file_names_are_served(nats_url: str, fleet: str, name: str) -> None:
    """Only existing file names are served, so no name leads out of the folder."""
    async with http_before(nats_url, fleet) as http:
        # The raw path is set because httpx would normalize `..`.
        request = http.client.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=f"/assets/{name}".encode())
        answer = await http.client.send(request)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"


def test_the_folder_contains_exactly_the_served_files() -> None:
    """The folder contains exactly the served files, so the wheel has no unused file."""
    assert {path.name for path in FOLDER.iterdir()} == set(assets())


def test_all_files_are_reached_from_the_page() -> None:
    """Each script is imported, and each file that the page or a script names exists."""
    named = set(re.findall(r'(?:href|src)="assets/([^"]+)"', OWN["index.html"]))
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([^"]+)"', text)) | set(re.findall(r'"assets/([^"]+)"', text))
    others = {"index.html", "uplot.json", "uplot.LICENSE.txt"}
    assert named == set(assets()) - others


@pytest.mark.parametrize("name", OWN)
def test_the_files_contain_no_address_of_another_host(name: str) -> None:
    """The files contain no address of another host, apart from XML namespaces."""
    text = OWN[name].replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text) == []
    assert "@import" not in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_interpret_text_as_html_or_code(name: str) -> None:
    """Scripts never interpret text from the wire as HTML or code, because a worker may be named `<script>`."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|srcdoc"
    assert re.findall(forbidden, SCRIPTS[name]) == []
    assert re.findall(r"\beval\b|new Function|setTimeout\(\s*[\"'`]|import\(|javascript:", SCRIPTS[name]) == []


def test_the_page_has_no_inline_script_or_style() -> None:
    """The page has no inline script or style, because the policy would refuse them."""
    html = OWN["index.html"]
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html) == []
    assert [name for name, text in SCRIPTS.items() if re.search(r"\"style\"|\bstyle: [\"'`{]|cssText", text)] == []


def test_the_token_is_in_no_address_and_stays_in_the_tab() -> None:
    """Only session.js uses `sessionStorage`, and the token leaves the tab only in the Authorization header."""
    users = {name for name, text in SCRIPTS.items() if "sessionStorage." in text}
    assert users == {"session.js"}
    assert SCRIPTS["session.js"].count("Bearer ${token()}") == SCRIPTS["session.js"].count("`Bearer") == 1
    assert {name for name, text in SCRIPTS.items() if "localStorage." in text} <= {"theme.js"}
    assert [name for name, text in SCRIPTS.items() if "document.cookie" in text] == []


def test_uplot_has_the_hashes_of_the_named_release() -> None:
    """The files of uPlot have the hashes of the named release, and include its licence."""
    noted = json.loads(assets()["uplot.json"].content)
    assert (noted["name"], noted["license"]) == ("uplot", "MIT")
    assert set(noted["files"]) == set(UPLOT) - {"uplot.json"}
    for name, each in noted["files"].items():
        assert hashlib.sha256(assets()[name].content).hexdigest() == each["sha256"], name
    assert noted["version"].encode() in assets()["uplot.min.js"].content[:200]
    assert b"MIT License" in assets()["uplot.LICENSE.txt"].content
    assert re.findall(rb"innerHTML|\beval\b|new Function", assets()["uplot.min.js"].content) == []


def test_the_document_has_the_page() -> None:
    """The OpenAPI document lists the page beside the routes for programs."""
    paths = document(OPEN, DATA, ADMIN, Settings(token="data", admin_token="admin"))["paths"]
    for path in ("/", "/assets/{name}"):
        assert "security" not in paths[path]["get"]
        assert {"200", "304"} <= set(paths[path]["get"]["responses"])
