"""Time limits of tests are long and scalable, and one module defines them."""

import asyncio
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.processes import KEPT, ROOT, RUN


@pytest.mark.parametrize(("slow", "ends"), [(1.0, True), (4.0, False)])
async def test_a_limit_in_progress_grows_while_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, slow: float, ends: bool
) -> None:
    """A timeout that has begun counts only the share of the time in which the test had a core."""
    monkeypatch.setattr(patience, "slowness", lambda: slow)
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.01)
    timed_out, over = False, asyncio.Event()
    asyncio.get_running_loop().call_later(0.4, over.set)
    try:
        async with patience.busy_timeout(0.2):
            await over.wait()
    except TimeoutError:
        timed_out = True

    assert timed_out is ends


def test_the_run_ends_a_hanging_test_after_its_own_limit() -> None:
    """The longest limit of a test is shorter than `faulthandler_timeout`, in pytest's settings and in `.ci/test`."""
    longest_s = patience.ENGINE_HANGS_AFTER_S / patience.FACTOR * patience.MAX_SLOWNESS
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

    assert longest_s < settings["faulthandler_timeout"]
    assert f"print {settings['faulthandler_timeout']} * factor" in (ROOT / ".ci/test").read_text()


# A run of tests uses its own cache directory, removes it, and fails if it has left files in the user's directory.


CLEAN = """
from pathlib import Path

from rollbus.workers.config import default_cache_dir

def test_worker(fleet):
    path = Path(default_cache_dir()) / fleet
    path.mkdir(parents=True)
    print(path)
"""
LEAKY = """
from pathlib import Path

def test_worker(fleet):
    (Path({user!r}) / "rollbus" / fleet).mkdir(parents=True)
"""


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a test file, as a user whose cache directory is `folder / "user"`."""
    file = folder / "test_one.py"
    file.write_text(source.format(user=str(folder / "user")))
    environment = {name: value for name, value in os.environ.items() if name not in (RUN, *KEPT)}
    environment |= {"XDG_CACHE_HOME": str(folder / "user"), "TMPDIR": str(folder)}
    options = ("-s", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *options, str(file)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_tests_cache_is_removed_at_the_end(tmp_path: Path) -> None:
    """The default cache directory of workers lies in that of the run, and nothing of it stays."""
    done = run(tmp_path, CLEAN)

    assert done.returncode == 0, done.stdout
    assert "rollbus-test-cache-" in done.stdout
    assert not (tmp_path / "user").exists()
    assert list(tmp_path.glob("rollbus-test-cache-*")) == []


@pytest.mark.slow
def test_files_in_the_cache_directory_of_the_user_fail_the_run(tmp_path: Path) -> None:
    """If a test passes and leaves the directory of a fleet in the user's cache, the run fails and names it."""
    done = run(tmp_path, LEAKY)

    assert done.returncode == 1, done.stdout
    assert f"tests left in the user's cache directory: {tmp_path}/user/rollbus/test-" in done.stderr
