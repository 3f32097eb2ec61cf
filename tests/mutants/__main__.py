"""Plants faults one at a time in a copy of the checkout, and checks that their tests fail.

python -m tests.mutants [NAMES]

A fault may let a test wait for ever. `ROLLBUS_TEST_PATIENCE=0.3` ends such waits sooner on an idle machine.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
MAX_CPU_S = 120
"""CPU time of a run: a fault may let a test run for ever."""


@dataclass(frozen=True)
class Fault:
    """One fault of faults.toml."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Change the file below `root`."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def read_faults() -> list[Fault]:
    """Return all faults."""
    entries = tomllib.loads(FAULTS.read_text())
    return [Fault(name, tests=tuple(entry.pop("tests")), **entry) for name, entry in entries.items()]


def copy_checkout(target: Path) -> None:
    """Copy the tracked files and the new ones, with the links of src/."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def first_failure(root: Path, test: str) -> tuple[str | None, str]:
    """Run the tests of a file, or one test, in a copy. Return the first one that fails, and the end of the output."""
    # The copy's package, not the one of this environment.
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rfE", "-x", test]
    limited = ["prlimit", f"--cpu={MAX_CPU_S}", *command]
    done = subprocess.run(limited, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return test, f"no end within {MAX_CPU_S} s of CPU time"
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    return found[1] if found else None, done.stdout[-300:]


def missed_tests(root: Path, fault: Fault) -> list[str]:
    """Return the tests that pass despite the fault. Leave the copy as it was."""
    fault.plant(root)
    try:
        failures = {test: first_failure(root, test) for test in fault.tests}
    finally:
        shutil.copy2(ROOT / fault.file, root / fault.file)
    missed = {test: end for test, (failed, end) in failures.items() if failed is None}
    named = missed or [failed for failed, _ in failures.values() if failed]
    sys.stdout.write(f"{'MISSED' if missed else 'caught'} {fault.name}: {' '.join(named)}\n")
    sys.stdout.writelines(f"{end}\n" for end in missed.values())
    sys.stdout.flush()
    return list(missed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that the command line names, or all. Return 0 if each of their tests fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults of faults.toml; default: all")
    names = parser.parse_args(arguments).names
    faults = [fault for fault in read_faults() if not names or fault.name in names]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_checkout(Path(folder))
        missed = [fault.name for fault in faults if missed_tests(Path(folder), fault)]
    sys.stdout.write(f"{len(faults) - len(missed)} of {len(faults)} faults are caught.\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
