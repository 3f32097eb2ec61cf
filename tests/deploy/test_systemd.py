"""`deploy/systemd`, which `rollbus init --units` writes: systemd itself reads the units, and their commands exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollbus.frontend.cli import main
from rollbus.frontend.cli.app import build_parser
from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.errors import EXIT_DUPLICATE_WORKER
from tests.support.processes import ROOT

UNITS = sorted((ROOT / "deploy/systemd").iterdir())
SERVICES = [path for path in UNITS if path.suffix == ".service"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Let `rollbus init` write the units for this installation."""
    assert main(["init", "--units", str(tmp_path / "units")]) == ExitCode.OK
    return tmp_path / "units"


def test_init_writes_the_units_of_the_repository(written: Path) -> None:
    """The written units differ from deploy/systemd only in the directory of the programs."""
    programs = str(Path(sys.executable).parent)

    assert len(UNITS) == 4
    assert {path.name: path.read_text().replace(programs, "/opt/rollbus/bin") for path in written.iterdir()} == {
        path.name: path.read_text() for path in UNITS
    }


def test_no_unit_is_overwritten(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If one unit exists, none is written. --units has no meaning together with files of `rollbus up`."""
    kept = written / UNITS[-1].name
    for path in written.iterdir():
        path.unlink()
    kept.write_text("mine")

    assert main(["init", "--units", str(written)]) == ExitCode.USAGE
    assert f"{kept} exists" in capsys.readouterr().err
    assert [path.read_text() for path in written.iterdir()] == ["mine"]
    assert main(["init", "--units", str(written), "--env", "fleet.env"]) == ExitCode.USAGE


def test_systemd_accepts_the_units(written: Path) -> None:
    """`systemd-analyze verify` finds no unknown setting and no program that is missing."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; it is in Debian's package systemd")
    command = ["systemd-analyze", "verify", "--man=no", "--generators=no", *sorted(map(str, written.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    # Units of this machine, on which ours depend, may have faults of their own.
    ours = [line for line in done.stderr.splitlines() if "rollbus" in line or str(written) in line]
    assert ours == []
    # The check does find faults.
    unit = written / SERVICES[0].name
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=sometimes\nNoSuchSetting=yes"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "sometimes" in done.stderr
    assert "NoSuchSetting" in done.stderr


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_a_service_is_hardened(unit: Path) -> None:
    """A service has no root, no capabilities and a read-only system."""
    settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"\w+=", line))

    assert settings["User"] == "rollbus"
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["ProtectSystem"] == "strict"
    assert settings["NoNewPrivileges"] == "yes"
    assert settings["UMask"] == "0077"
    # A rolling restart ends a worker with exit code 0.
    assert settings["Restart"] == ("always" if "worker" in unit.name else "on-failure")


def test_a_worker_that_must_not_be_restarted_is_not() -> None:
    """A worker with a duplicate id is not restarted, and systemd waits longer than a worker drains."""
    text = (ROOT / "deploy/systemd/rollbus-worker@.service").read_text()
    [command] = re.findall(r"^ExecStart=\S*/rollbus (.+?) \$ROLLBUS_WORKER_OPTIONS$", text, re.MULTILINE)
    args = build_parser().parse_args(command.split())

    assert f"RestartPreventExitStatus=2 {EXIT_DUPLICATE_WORKER}\n" in text
    assert "KillMode=mixed\n" in text
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) >= args.drain_s + 30


def test_the_http_service_has_only_options_that_exist() -> None:
    """The command of rollbus-frontend.service parses."""
    text = (ROOT / "deploy/systemd/rollbus-frontend.service").read_text()
    [command] = re.findall(r"^ExecStart=\S*/rollbus (.+?) \$ROLLBUS_FRONTEND_OPTIONS$", text, re.MULTILINE)

    assert build_parser().parse_args(command.split()).command.name == "frontend"
