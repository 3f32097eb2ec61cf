"""`.ci/system-packages` installs missing programs, reports those that it cannot install, and never fails CI."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import SOON_S
from tests.support.processes import ROOT

USED = ("bash", "cat", "chmod", "rm", "tail", "timeout")
"""Programs that each machine has."""
INSTALLS = """echo "$@" >> {folder}/asked
case "$*" in *chromium-driver) : > {folder}/chromedriver; chmod +x {folder}/chromedriver;; esac"""
"""An apt-get with only one of the packages."""


def run(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script with only these programs on the path; each value is a line of shell code."""
    lines = {name: f'exec {shutil.which(name)} "$@"' for name in USED} | programs
    for name, line in lines.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{line}\n")
        (folder / name).chmod(0o755)
    # The policy file belongs to the machine, so the script runs with another path.
    script = (ROOT / ".ci/system-packages").read_text().replace("/usr/sbin/policy-rc.d", f"{folder}/policy")
    command = [str(folder / "bash"), "-c", script]
    return subprocess.run(
        command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False, timeout=SOON_S
    )


def test_nothing_is_installed_if_no_program_is_missing(tmp_path: Path) -> None:
    """On a machine with all programs, the script installs nothing and prints nothing."""
    has = dict.fromkeys(("chromium", "chromedriver", "promtool"), "exit 0")
    done = run(tmp_path, **has, **{"apt-get": f": > {tmp_path}/asked"}, id="echo 0")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("programs", "reason"),
    [({"id": "echo 0"}, "apt-get is missing"), ({"id": "echo 1000", "apt-get": "exit 1"}, "only root may install")],
)
def test_programs_that_cannot_be_installed_are_named(tmp_path: Path, programs: dict[str, str], reason: str) -> None:
    """The message names the missing programs and the command that installs them, and the exit code is 0."""
    done = run(tmp_path, chromium="exit 0", **programs)

    assert done.returncode == 0
    assert f"NOT INSTALLED: chromedriver promtool ({reason})." in done.stderr
    assert "apt-get install chromium-driver prometheus\n" in done.stderr


def test_a_failed_package_does_not_stop_the_other_packages(tmp_path: Path) -> None:
    """Each package is installed separately without starting services, and the failed package is named."""
    done = run(tmp_path, chromium="exit 0", id="echo 0", **{"apt-get": INSTALLS.format(folder=tmp_path)})

    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["update", "chromium-driver", "prometheus"]
    assert done.returncode == 0
    assert "NOT INSTALLED: promtool (apt-get failed)." in done.stderr
    assert not (tmp_path / "policy").exists()
