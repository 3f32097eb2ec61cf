"""The code blocks of docs/guides and docs/operate run as pasted, on one `rollbus up` with a real engine."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from rollbus.bus.nats.embedded import find_binary
from tests.cli.support import running_up, serves
from tests.docs.blocks import TRAINERS, make_checkout, page_script, pages, read_blocks
from tests.support.processes import ROOT
from tests.support.waits import Shared, patient

PAGE_TIMEOUT_S = patient(300.0)
"""Timeout of all blocks of one page, which usually take some seconds."""
PAGES = pages()
OTHER_PAGES = ("index", "trainer", "disaggregation")
LINKED = [ROOT / "README.md", *PAGES, *(ROOT / "docs" / f"{name}.md" for name in OTHER_PAGES)]
RUNNABLE = [page for page in PAGES if any(block.is_run for block in read_blocks(page))]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBUS_"))}


class Fleet(NamedTuple):
    """A running `rollbus up` and the folder for the checkouts of the pages."""

    folder: Path
    nats: str
    http: str


END_WITH_STDIN = "exec 3<&0 </dev/null; { read -r <&3 || kill -- -$$; } &\n"
"""Ends the script and its background blocks when this process is killed, since that closes the pipe."""


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Fleet]]:
    """Provide one fleet for all pages, which is replaced if its worker no longer serves."""
    with Shared(
        lambda: running_fleet(tmp_path_factory.mktemp("pages")), is_sound=lambda fleet: serves(fleet.nats)
    ) as shared:
        yield shared


@contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Run the shared `rollbus up` of all pages."""
    state = folder / "state"
    state.mkdir()
    options = ("--http", "127.0.0.1:0", "--state-dir", str(state), "--cache-dir", str(folder / "cache"))
    with running_up(*options, "--weight-root", str(folder), log=folder / "log") as (_, info):
        yield Fleet(folder, info["nats"], info["http"])


@pytest.mark.vllm
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_run_as_pasted(page: Path, fleets: Shared[Fleet]) -> None:
    """All blocks of a page run in their order in a fresh checkout and exit with code 0."""
    fleet = fleets.get()
    checkout = fleet.folder / page.stem
    make_checkout(checkout, fleet.folder / "state")
    addresses = {
        "127.0.0.1:4222": fleet.nats.removeprefix("nats://"),
        "127.0.0.1:8080": fleet.http.removeprefix("http://"),
    }
    script, output = fleet.folder / f"{page.stem}.sh", fleet.folder / f"{page.stem}.txt"
    script.write_text(END_WITH_STDIN + page_script(read_blocks(page), addresses))
    path = f"{find_binary().parent}{os.pathsep}{os.environ['PATH']}"
    with (
        output.open("w") as stdout,
        subprocess.Popen(
            ["bash", str(script)],
            cwd=checkout,
            env={**ENVIRONMENT, "ROLLBUS_NATS": fleet.nats, "PATH": path},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(PAGE_TIMEOUT_S)
        finally:
            # Background processes belong to the same group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    assert code == 0, output.read_text()[-5000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_have_a_known_language_and_known_attributes(page: Path) -> None:
    """Each block has a known language and known attributes. The first command of a page runs on any machine.

    The guides of trainers are excepted: their first command installs a package.
    """
    blocks = read_blocks(page)
    faults = [fault for block in blocks for fault in block.faults]
    assert not faults, "\n".join(faults)

    if page.parent == ROOT / "docs" / TRAINERS:
        return
    [first, *_] = [block for block in blocks if block.language in {"sh", "python"} and not block.is_background]
    assert first.is_run, f"{first.place}: the first command of a page must work on any machine"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_to_files(page: Path) -> None:
    """Each relative link leads to an existing file."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]

    assert [target for target in relative if not (page.parent / target).exists()] == []
