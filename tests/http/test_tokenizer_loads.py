"""Tokenizers that cannot be loaded, or whose load hangs. The service serves all other requests and can stop."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollbus.frontend.http import text as loads_module
from rollbus.frontend.http.settings import Settings
from rollbus.frontend.http.text import TokenizerLoads
from rollbus.frontend.tokenization import Tokenizer, TokenizerUnavailable
from tests.cli.support import ENV
from tests.http.openai_support import COMPLETIONS
from tests.http.small_tokenizers import byte_level, make_byte_level, save
from tests.http.support import http_service
from tests.support.patience import SOON_S
from tests.support.waits import until_true

TEXT = {"prompt": "a", "max_tokens": 1}


async def test_a_malformed_tokenizer_gives_501_until_the_files_are_repaired(
    nats_url: str, fleet: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that raises a `TypeError` gives 501 for text until the files are repaired, and is logged once."""
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", SOON_S)
    (tmp_path / "config.json").write_text("[1]")
    async with http_service(nats_url, fleet, Settings(tokenizer=tmp_path)) as http:
        for _ in range(2):
            assert (await http.client.get("/ready")).status_code == 200
        answer = await http.client.post(COMPLETIONS, json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_tokenizer")
        assert f"no tokenizer in {tmp_path}" in answer.json()["error"]["message"]
        (tmp_path / "config.json").unlink()
        save(make_byte_level(), tmp_path)
        assert (await http.client.post(COMPLETIONS, json=TEXT)).status_code == 200

    [logged] = [line for line in caplog.messages if line.startswith("tokenizer.")]
    assert logged.startswith(f"tokenizer.load_failed error=no tokenizer in {tmp_path}")


async def test_a_rust_panic_fails_only_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Rust panic, which is no `Exception`, fails only the load. Only a request repeats a failed load."""
    loads, panics = TokenizerLoads(), [True, True]

    class Panic(BaseException):
        """A panic as pyo3 raises it."""

    def load(_folder: Path) -> Tokenizer:
        if panics:
            panics.pop()
            raise Panic("index out of bounds")
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    for _ in range(3):
        while not await loads.has_ended(tmp_path):
            pass
    with pytest.raises(TokenizerUnavailable, match="a library failed"):
        await loads.tokenizer(tmp_path)
    assert await loads.tokenizer(tmp_path) is byte_level()
    assert caplog.messages.count(f"tokenizer.load_panicked folder={tmp_path}") == 2


async def test_the_number_of_kept_tokenizers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, the tokenizer used least recently is loaded again, and no thread begins while all load."""
    loaded: list[str] = []
    may_end = threading.Event()

    def load(folder: Path) -> Tokenizer:
        loaded.append(folder.name)
        assert folder.name != "hangs" or may_end.wait(SOON_S)
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "MAX_LOADS", 2)
    loads = TokenizerLoads()
    for name in ("a", "b", "a", "c", "a", "b"):
        await loads.tokenizer(tmp_path / name)
    assert loaded == ["a", "b", "c", "b"]

    loads, begun = TokenizerLoads(), len(loaded)
    async with asyncio.TaskGroup() as tasks:
        for name in ("hangs", "waits"):
            tasks.create_task(loads.tokenizer(tmp_path / name))
        await until_true(lambda: len(loaded) > begun)
        with pytest.raises(TokenizerUnavailable, match="2 other tokenizers are being loaded"):
            await loads.tokenizer(tmp_path / "more")
        may_end.set()
    assert loaded[begun:] == ["hangs", "waits"]


async def test_a_service_stops_while_a_load_hangs(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service waits for a hanging load only up to its limit, and starts no further load."""
    may_end, begun = threading.Event(), []

    def load(folder: Path) -> Tokenizer:
        begun.append(folder)
        may_end.wait()
        return byte_level()

    monkeypatch.setattr(loads_module, "load_tokenizer", load)
    monkeypatch.setattr(loads_module, "PRELOAD_WAIT_S", 0.05)
    monkeypatch.setattr(loads_module, "STOP_WAIT_S", 0.05)
    loads = TokenizerLoads()
    try:
        async with asyncio.timeout(SOON_S):
            async with http_service(nats_url, fleet, Settings(tokenizer=tmp_path)) as http:
                assert (await http.client.get("/ready")).status_code == 503
            for name in "ab":
                assert not await loads.has_ended(tmp_path / name)
            await loads.stop()
    finally:
        may_end.set()
    await asyncio.to_thread(_join_loads)
    assert begun == [tmp_path, tmp_path / "a"]


def _join_loads() -> None:
    for thread in threading.enumerate():
        if thread.name == "tokenizer-load":
            thread.join(SOON_S)


HANGS = """
import asyncio, pathlib, threading
from rollbus.frontend.http import text

text.load_tokenizer = lambda folder: threading.Event().wait()
text.PRELOAD_WAIT_S = text.STOP_WAIT_S = 0.01

async def main():
    loads = text.TokenizerLoads()
    assert not await loads.has_ended(pathlib.Path("/a"))
    await loads.stop()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_process_ends_while_a_load_hangs() -> None:
    """A hanging load does not keep the process alive."""
    subprocess.run([sys.executable, "-P", "-c", HANGS], env=ENV, timeout=SOON_S, check=True)
