"""docs/operate/three-nodes.md is executed on three network namespaces; then the third node's link goes down."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rollbus.bus.nats.embedded import find_binary
from tests.docs.blocks import Block, make_checkout, read_blocks
from tests.support.processes import ROOT
from tests.support.waits import patient

PAGE = ROOT / "docs" / "operate" / "three-nodes.md"
WHERE = re.compile(r"# (?:node ([123])|each node)\n")
BLOCK_TIMEOUT_S = patient(60.0)
"""Timeout of one block, which takes at most seconds."""
REPLACED = {"--model /models/my-model": "--engine synthetic --served-model-name my-model"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBUS_"))}


def ip(*words: str) -> str:
    """Run `ip`. Return its stdout."""
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


class Nodes:
    """Three namespaces `rbPID-1` to `rbPID-3` at 10.77.0.1 to 10.77.0.3, joined by a bridge in a fourth."""

    def __init__(self) -> None:
        self._prefix = f"rb{os.getpid()}"

    def name(self, node: int) -> str:
        """Return the name of a node's namespace; 0: of the bridge's."""
        return f"{self._prefix}-{node}"

    @contextmanager
    def up(self) -> Iterator[None]:
        """Make the namespaces. At the end, remove them; their devices go with them."""
        with ExitStack() as stack:
            for node in range(4):
                ip("netns", "add", self.name(node))
                stack.callback(ip, "netns", "delete", self.name(node))
            switch = ("-n", self.name(0))
            ip(*switch, "link", "add", "bridge", "type", "bridge")
            ip(*switch, "link", "set", "bridge", "up")
            for node in (1, 2, 3):
                own, port = ("-n", self.name(node)), f"port{node}"
                ip(*switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.name(node))
                ip(*switch, "link", "set", port, "master", "bridge", "up")
                ip(*own, "address", "add", f"10.77.0.{node}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip(*own, "link", "set", device, "up")
            yield

    def unplug(self, node: int) -> None:
        """Take a node's link down."""
        ip("-n", self.name(0), "link", "set", f"port{node}", "down")


class Recipe:
    """Runs the blocks of the page in the namespaces of their nodes, in one directory."""

    def __init__(self, nodes: Nodes, checkout: Path, stack: ExitStack) -> None:
        self._nodes, self._checkout, self._stack = nodes, checkout, stack
        self._variables = ""
        self._logs: list[Path] = []
        self.outputs: dict[int, str] = {}

    def run(self, block: Block) -> str:
        """Run a block to its end, or start it in the background. Return its output."""
        where = WHERE.match(block.text)
        assert where, f"{block.place}: the first line names no node"
        text = block.text
        for ours, theirs in REPLACED.items():
            text = text.replace(ours, theirs)
        if where[1] is None:
            self._variables += text
            return ""
        log = self._checkout.parent / f"{block.line}.log"
        self._logs.append(log)
        words = ["ip", "netns", "exec", self._nodes.name(int(where[1])), "bash", "-euo", "pipefail", "-c"]
        path = f"{self._checkout}/.venv/bin{os.pathsep}{find_binary().parent}{os.pathsep}{os.environ['PATH']}"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*words, self._variables + text],
                cwd=self._checkout,
                env={**ENVIRONMENT, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(_end, process)
        if not block.is_background:
            try:
                code = process.wait(BLOCK_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
            assert code == 0, f"{block.place}: {code}\n" + "\n".join(
                f"{each}\n{each.read_text()[-3000:]}" for each in self._logs
            )
        self.outputs[block.line] = log.read_text()
        return self.outputs[block.line]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Provide three nodes."""
    if shutil.which("ip") is None or shutil.which("openssl") is None or shutil.which("curl") is None:
        pytest.skip("needs ip, openssl and curl")
    made = Nodes()
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(made.up())
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted: {error.stderr.strip().splitlines()[-1]}")
            yield made
    finally:
        left = [line for line in ip("netns", "list").splitlines() if line.startswith(made.name(0)[:-1])]
        assert left == []


@pytest.mark.slow
def test_the_recipe_for_three_nodes_runs_and_survives_a_node(nodes: Nodes, tmp_path: Path) -> None:
    """The page's commands make a fleet whose requests, by the trainer and over HTTP, are answered without node 3."""
    (tmp_path / "state").mkdir()
    checkout = tmp_path / "checkout"
    make_checkout(checkout, tmp_path / "state")
    blocks = [block for block in read_blocks(PAGE) if block.language == "sh"]
    requests = blocks[-2:]
    with ExitStack() as stack:
        recipe = Recipe(nodes, checkout, stack)
        begun = time.monotonic()
        for block in blocks[:-1]:
            output = recipe.run(block)
        # The page has this number.
        sys.stdout.write(f"first answer after {time.monotonic() - begun:.1f} s\n")
        over_http = recipe.run(requests[1])
        nodes.unplug(3)
        after = [recipe.run(block) for block in (requests[0], requests[0])]

    assert re.match(r"\[( *\d+){8}\] \[0( 0){7}\] 1\n", output), output
    assert '"token_ids":[' in over_http
    # The output has the log too, which says for how long requests waited.
    assert all(re.search(r"^\[( *\d+){8}\] ", each, re.MULTILINE) for each in after), after
