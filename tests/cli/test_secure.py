"""`rollbus up --secure`: a fleet on this machine that accepts only connections with credentials."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.support import descendants_of, rollbus, running_up

pytestmark = pytest.mark.slow


def test_up_accepts_only_connections_with_credentials(tmp_path: Path) -> None:
    """The parts of the fleet have credentials. A viewer reads, a trainer generates, an admin pauses.

    A connection without credentials is refused.
    """
    auth, log = tmp_path / "auth", tmp_path / "log"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}) + "\n")
    options = ("--secure", "--auth-dir", str(auth), "--engine", "synthetic", "--workers", "2", "--http", "127.0.0.1:0")
    with running_up(*options, log=log) as (process, told):
        url = told["nats"]
        creds = {path.stem.partition("-")[0]: str(path) for path in (auth / "default").glob("*.creds")}
        seeds = [json.loads(path.read_bytes())["seed"] for path in (auth / "default").glob("*.creds")]
        seeds.append((auth / "default" / "root.seed").read_text().strip())
        nobody = rollbus("status", nats=url)
        seen = rollbus("status", "--json", "--creds", creds["viewer"], nats=url)
        output = ("--output", str(tmp_path / "out.jsonl"), "--json", "--creds", creds["trainer"])
        generated = rollbus("generate", "--input", str(prompts), *output, nats=url)
        paused = rollbus("pause", "--creds", creds["admin"], nats=url)
        refused = rollbus("resume", "--creds", creds["trainer"], nats=url)
        listing = "".join(_arguments(pid) for pid in [process.pid, *descendants_of(process.pid)])

    assert (nobody.returncode, "Authorization Violation" in nobody.stderr) == (1, True)
    assert [worker["state"] for worker in json.loads(seen.stdout)["workers"]] == ["serving", "serving"]
    assert json.loads(generated.stdout)["done"] == 1
    assert (paused.returncode, refused.returncode) == (0, 1)
    assert "user trainer (role trainer) may not record commands; roles that may: frontend, admin" in refused.stderr
    assert len(seeds) == 7
    for text in (listing, log.read_text(), json.dumps(told)):
        assert [seed for seed in seeds if seed in text] == []
    assert "Violation" not in log.read_text()


def _arguments(pid: int) -> str:
    """Return the command line of a process."""
    return subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout


def test_auth_dir_without_secure_is_a_usage_error(tmp_path: Path) -> None:
    """--auth-dir without --secure is a usage error, because it would secure nothing."""
    done = rollbus("up", "--auth-dir", str(tmp_path))

    assert (done.returncode, "--auth-dir requires --secure" in done.stderr) == (2, True)
