"""Requests from web pages of other origins are refused if the service does not require both tokens."""

import argparse
import asyncio
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from rollbus.frontend.cli.commands.machine import host_name
from rollbus.frontend.cli.local.http import settings_of
from rollbus.frontend.http import Settings, page
from rollbus.frontend.http.access import check_media_type, check_origin
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.page import HEADERS, POLICY, assets
from rollbus.schemas.presence import WorkerState
from tests.http.support import Http, Serve

EVIL = "http://evil.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAA"}
FOREIGN: dict[str, dict[str, str]] = {
    "Origin": {"Origin": EVIL},
    "Origin null": {"Origin": "null"},
    "Sec-Fetch-Site": {"Sec-Fetch-Site": "cross-site"},
    "Host": {"Host": "evil.example"},
    "Host rebound": {"Host": "evil.example:8080", "Origin": f"{EVIL}:8080", "Sec-Fetch-Site": "same-origin"},
}
"""The headers that a browser sends for pages of other origins, by the decisive header."""


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Return status, error code and field."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def until_serving(http: Http) -> None:
    """Check that no command has reached the worker."""
    state = await http.rb.fleet.state()
    assert not state.desired
    assert [worker.state for worker in state.workers] == [WorkerState.SERVING]


@pytest.mark.parametrize("tokens", [{}, {"token": "data"}, {"admin_token": "admin"}])
async def test_a_page_of_another_origin_cannot_pause_the_fleet(serve: Serve, tokens: dict[str, str]) -> None:
    """A page of another origin cannot pause the fleet: not by a text body, a rebound host name, or without a body."""
    async with serve(Settings(**tokens)) as http:  # type: ignore[arg-type]
        for told, foreign in FOREIGN.items():
            for body in (b"", b'{"mode": "abort"}'):
                headers = {"Content-Type": "text/plain", **foreign}
                answer = await http.client.post("/v1/rl/pause", content=body, headers=headers)
                code = "foreign_host" if told.startswith("Host") else "cross_origin"
                assert refusal(answer) == (403, code, told.partition(" ")[0])
        await until_serving(http)


async def test_all_routes_refuse_pages_of_other_origins(serve: Serve) -> None:
    """All routes refuse pages of other origins for any method, preflight or upgrade. No page may read a response."""
    routes = [*OPEN, *DATA, *ADMIN]
    asked = [*routes, ("GET", "/nowhere"), *(("OPTIONS", path) for _, path in routes)]
    asked += [("HEAD", path) for method, path in routes if method == "GET"]
    async with serve() as http, httpx.AsyncClient(base_url=http.url) as client:
        for method, path in asked:
            headers = {**PREFLIGHT, "Origin": EVIL} if method == "OPTIONS" else {"Origin": EVIL}
            for foreign in (headers, {"Host": "evil.example"}):
                answer = await client.request(method, path, headers=foreign)
                assert answer.status_code == 403, (method, path)
                assert not [name for name in answer.headers if name.startswith("access-control-")]
        upgraded = await http.client.get("/v1/rl/state", headers={**UPGRADE, "Origin": EVIL})
        assert refusal(upgraded) == (403, "cross_origin", "Origin")
        found = (await http.client.get("/metrics")).text
        assert 'rollbus_http_requests_total{method="any",model="",route="none",status="403"}' in found
        await until_serving(http)


async def test_the_error_of_a_refused_host_has_the_allowed_names(serve: Serve) -> None:
    """A refused host gives an error with the header, its value and the allowed names."""
    settings = Settings(allowed_hosts=frozenset({"fleet.example.com"}))
    async with serve(settings) as http:
        answer = await http.client.get("/health", headers={"Host": "Evil.example:80"})
        message = answer.json()["error"]["message"]
        assert message == (
            "Host is 'Evil.example:80'; allowed: localhost, fleet.example.com, and addresses; --allowed-host adds names"
        )
        for name in ("Fleet.Example.Com", "fleet.example.com:443", "localhost:1", "127.0.0.1", "[::1]:8080"):
            assert (await http.client.get("/health", headers={"Host": name})).status_code == 200


async def test_clients_and_own_pages_are_served(serve: Serve) -> None:
    """Programs send no Origin, and the service's own page sends its own, also behind a proxy with TLS.

    Both are served.
    """
    own = [
        {},
        {"Origin": "http://localhost:8080", "Host": "localhost:8080", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "https://fleet.example.com", "Host": "fleet.example.com"},
        {"Sec-Fetch-Site": "none"},
    ]
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
    settings = Settings(allowed_hosts=frozenset({"fleet.example.com"}))
    async with serve(settings) as http:
        for headers in own:
            assert (await http.client.post("/inference/v1/generate", json=body, headers=headers)).status_code == 200


async def test_other_sites_may_only_link_to_the_page(serve: Serve) -> None:
    """Other sites may link to the page, but not load it in a frame, script or image, and not link to other routes."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with serve() as http:
        assert (await http.client.get("/", headers=link)).status_code == 200
        for more in (
            {"Sec-Fetch-Dest": "iframe"},
            {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
            {"Origin": EVIL},
            {"Host": "evil.example"},
        ):
            assert (await http.client.get("/", headers={**link, **more})).status_code == 403
        for path in ("/docs", "/assets/main.js", "/v1/rl/state", "/v1/rl/events"):
            assert (await http.client.get(path, headers=link)).status_code == 403
        assert (await http.client.post("/resume", headers=link)).status_code == 403


async def test_if_both_tokens_are_set_only_the_tokens_decide(serve: Serve) -> None:
    """If both tokens are set, only they decide, so no host name must be allowed behind a proxy."""
    async with serve(Settings(token="data", admin_token="admin")) as http:
        admin = {"Authorization": "Bearer admin"}
        for headers in FOREIGN.values():
            assert (await http.client.post("/v1/rl/pause", json={}, headers=headers)).status_code == 401
            assert (await http.client.get("/v1/rl/state", headers=headers)).status_code == 401
            assert (await http.client.get("/health", headers=headers)).status_code == 200
            assert (await http.client.get("/v1/rl/state", headers={**headers, **admin})).status_code == 200
        preflight = await http.client.options("/v1/rl/pause", headers={**PREFLIGHT, "Origin": EVIL})
        assert not [name for name in preflight.headers if name.startswith("access-control-")]
        await until_serving(http)


@pytest.mark.parametrize("settings", [Settings(), Settings(token="data", admin_token="admin")])
async def test_a_body_without_the_json_media_type_gives_415(serve: Serve, settings: Settings) -> None:
    """A body without the JSON media type gives 415 on each route, and a request without a body needs no media type."""
    async with serve(settings) as http:
        http.client.headers["Authorization"] = "Bearer admin"
        del http.client.headers["Content-Type"]
        for method, path in (key for key, route in {**DATA, **ADMIN}.items() if route.body is not None):
            for declared in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", None):
                headers = {} if declared is None else {"Content-Type": declared}
                answer = await http.client.request(method, path, content=b"{}", headers=headers)
                assert refusal(answer) == (415, "unsupported_media_type", "Content-Type"), path
        await until_serving(http)
        assert (await http.client.post("/resume")).status_code == 200
        as_json = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert (await http.client.post("/resume", content=b"{}", headers=as_json)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([("host", "localhost"), ("host", "localhost")], "Host"),
        ([("host", "")], "Host"),
        ([("host", "evil.example@localhost")], "Host"),
        ([("host", "localhost.evil.example")], "Host"),
        ([("host", "127.0.0.1.evil.example")], "Host"),
        ([("host", "[::1]evil.example")], "Host"),
        ([("host", "localhost:8080"), ("origin", "http://localhost:3000")], "Origin"),
        ([("host", "localhost:8080"), ("origin", "http://127.0.0.1:8080")], "Origin"),
        ([("host", "localhost"), ("origin", "https://localhost:80")], "Origin"),
        ([("host", "localhost"), ("origin", "file://")], "Origin"),
        ([("host", "localhost"), ("origin", "http://")], "Origin"),
        ([("host", "localhost"), ("origin", "localhost")], "Origin"),
        ([("host", "localhost"), ("origin", "http://localhost"), ("origin", "http://evil")], "Origin"),
        ([("origin", "http://localhost")], "Origin"),
        ([("host", "localhost"), ("sec-fetch-site", "same-site")], "Sec-Fetch-Site"),
    ],
)
def test_another_port_and_a_similar_name_are_refused(headers: list[tuple[str, str]], param: str) -> None:
    """Another port is another origin, and a name that resembles an allowed name is refused."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    with pytest.raises(HttpError) as refused:
        check_origin(Headers(raw=raw), frozenset())
    assert (refused.value.status, refused.value.param) == (403, param)


@pytest.mark.parametrize("host", ["localhost.", "LOCALHOST:1", "0.0.0.0:8080", "[fe80::1]", "10.0.0.1"])
def test_addresses_and_localhost_are_allowed(host: str) -> None:
    """Addresses and localhost are allowed because no other site controls them. HTTP/1.0 clients may send no Host."""
    check_origin(Headers({"host": host}), frozenset())
    check_origin(Headers({"host": host, "origin": f"http://{host.lower()}"}), frozenset())
    check_origin(Headers({}), frozenset())


def test_a_chunked_body_requires_the_json_media_type() -> None:
    """A chunked body requires the JSON media type, and several Content-Type headers count as none."""
    for headers in ({"transfer-encoding": "chunked"}, {"content-length": "1", "content-type": "application/jsonp"}):
        with pytest.raises(HttpError, match="415 unsupported_media_type"):
            check_media_type(Headers(headers))
    two = [(b"content-length", b"1"), *[(b"content-type", b"application/json")] * 2]
    with pytest.raises(HttpError, match="415 unsupported_media_type"):
        check_media_type(Headers(raw=two))
    check_media_type(Headers({"content-length": "0", "content-type": "text/plain"}))


@pytest.mark.parametrize("name", ["http://a", "a:80", "*", "", "a b", "a.", "::1"])
def test_an_allowed_host_must_be_a_host_name(name: str) -> None:
    """An --allowed-host that is not a host name is a wrong option."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not a host name"):
        host_name(name)
    assert host_name("Fleet.example.com") == "fleet.example.com"
    assert settings_of(argparse.Namespace(allowed_host=[]), "MyHost").allowed_hosts == {"myhost"}


async def test_an_upgrade_request_gets_a_normal_response(serve: Serve) -> None:
    """A request for a websocket gets a normal response, and the connection can be closed."""
    async with serve() as http:
        host, port = http.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines: dict[str, Any] = {"Host": host, **UPGRADE, "Origin": EVIL}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"GET /v1/rl/state HTTP/1.1\r\n{head}\r\n".encode())
        assert (await reader.readline()).split()[1] == b"403"
        writer.close()


# The page at `/` and its files: public, equal for all users, and without connections to other hosts.


FOLDER = Path(str(files(page) / "assets"))
UPLOT = ("uplot.min.js", "uplot.min.css", "uplot.LICENSE.txt", "uplot.json")
OWN = {name: found.content.decode() for name, found in assets().items() if name not in UPLOT}
"""The texts of the files that belong to rollbus."""
SCRIPTS = {name: text for name, text in OWN.items() if name.endswith(".js")}


async def test_the_page_needs_no_token(serve_fleet: Serve) -> None:
    """The page needs no token, and its headers permit only its own files."""
    async with serve_fleet(Settings(token="data", admin_token="admin")) as http:
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


async def test_every_file_is_served_with_its_type(serve_fleet: Serve) -> None:
    """Each file has its media type, because browsers refuse scripts of another type. A known ETag gives 304."""
    types = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}
    async with serve_fleet() as http:
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


NO_FILES = (
    *("nothing.js", "__init__.py", "../__init__.py", "..%2f__init__.py", "%2e%2e/__init__.py", "%2e%2e%2f__init__.py"),
    *("..%5c__init__.py", "....//__init__.py", "%2fetc%2fpasswd", "main.js%00.css", ""),
)


async def test_only_existing_file_names_are_served(serve_fleet: Serve) -> None:
    """Only existing file names are served, so no name leads out of the folder."""
    async with serve_fleet() as http:
        for name in NO_FILES:
            # The raw path is set because httpx would normalize `..`.
            request = http.client.build_request("GET", "/")
            request.url = request.url.copy_with(raw_path=f"/assets/{name}".encode())
            answer = await http.client.send(request)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route"), name


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
