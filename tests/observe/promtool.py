"""Runs promtool, Prometheus's own checker."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waits import HANGS_AFTER_S

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: Debian's package prometheus has it"
)
COLON = re.compile(r"vllm:\w+ metric names should not contain ':'")
"""promtool's message for names with a colon. These are vLLM's own names, which programs read."""


def promtool(*arguments: str | Path) -> str:
    """Run promtool, and fail with its output if it finds a problem."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS_AFTER_S)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout + done.stderr


def promtool_check_metrics(text: str) -> list[str]:
    """Return promtool's messages on an exposition, except those on the colon in vLLM's names."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=HANGS_AFTER_S)
    return [line for line in (done.stdout + done.stderr).splitlines() if not COLON.fullmatch(line)]
