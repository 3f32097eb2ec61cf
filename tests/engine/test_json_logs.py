"""vLLM's log lines are JSON if the worker's lines are JSON, also in the processes that vLLM starts."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

# The steps of an engine core's process before its first log line: vLLM's own setup and its prefix of each line.
CORE = """
from vllm import logger
from vllm.logger import init_logger
from vllm.utils.system_utils import decorate_logs
if hasattr(logger, "configure_logging"):
    # From 0.32 on; before, importing it was enough.
    from vllm.config.logging import LoggingConfig
    logger.configure_logging(LoggingConfig())
decorate_logs("EngineCore")
init_logger("vllm.some.module").warning("it is %s", "so")
init_logger("vllm.some.module").info("not shown")
import logging
logging.getLogger("rollbus.workers.engines.vllm.extension").error("lora.load_failed name=%s", "math")
"""
WORKER = f"""
import subprocess, sys
from rollbus.bus.logs import set_up
from rollbus.workers.engines.vllm.launch import set_environment
set_up("INFO", "json")
set_environment("model", None)
subprocess.run([sys.executable, "-c", {CORE!r}], check=True)
"""


def test_an_engine_core_logs_json() -> None:
    """A log line of vLLM is JSON, with vLLM's level, and so are rollbus's own log lines in that process."""
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)

    lines = [json.loads(line) for line in done.stderr.splitlines()]
    shown = [
        (line["level"], line["logger"], line["event"], line["fields"])
        for line in lines
        # vLLM warns about missing features of the machine.
        if not line["logger"].startswith("vllm.platforms")
    ]
    assert shown == [
        ("warning", "vllm.some.module", "message", {"message": "it is so"}),
        ("error", "rollbus.workers.engines.vllm.extension", "lora.load_failed", {"name": "math"}),
    ]
