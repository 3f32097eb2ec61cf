"""A request and a token do not cost more Python than `bench/instructions.json` says."""

import subprocess
import sys

import pytest

from bench.instructions import differences
from tests.support.processes import ROOT
from tests.support.waits import SOON_S


@pytest.mark.slow
def test_a_request_and_a_token_cost_what_is_recorded() -> None:
    """No count differs from the recorded one by more than 3 %, and the functions of each feature still have a cost."""
    command = [sys.executable, "-m", "bench.instructions", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10 * SOON_S)

    assert done.returncode == 0, done.stderr


def test_a_count_that_grew_or_fell_is_named() -> None:
    """A figure that rose or fell by more than 3 % is named with both values, so the recorded ones stay true."""
    recorded = {"token bus": {"instructions": 100.0, "c_calls": 10.0}}

    assert differences({"token bus": {"instructions": 102.9, "c_calls": 9.8}}, recorded) == []
    assert differences({"token bus": {"instructions": 104.0, "c_calls": 9.0}}, recorded) == [
        "token bus: 100.0 instructions are now 104.0 (+4.0%)",
        "token bus: 10.0 c_calls are now 9.0 (-10.0%)",
    ]
