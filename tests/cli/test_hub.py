"""Models by Hugging Face id, from a cache and from a fake hub, without a network."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.exits import ExitCode
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.options import is_hub_id
from tests.cli.support import ENV, rollbus, running_up
from tests.control.support import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "org/tiny"
UP = ("up", "--engine", "synthetic", "--nats", "nats://127.0.0.1:0", "--http", "127.0.0.1:0", "--model", ID)


def hub_env(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a command with its own cache."""
    return {**ENV, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def write_cache(home: Path, checkpoint: Path) -> Path:
    """Write a checkpoint in the layout of the hub's cache, with links to blobs. Return the folder of the snapshot."""
    repo = home / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        file.rename(repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    return snapshot


@contextmanager
def serving_hub(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one model as the hub does. Yield the address and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path == f"/api/models/{ID}/revision/main":
                self._answer({"id": ID, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            elif path == f"/api/models/{ID}/tree/{COMMIT}":
                self._answer(
                    [
                        {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for file, data in files.items()
                    ]
                )
            elif path == f"/{ID}/resolve/{COMMIT}/{name}" and name in files:
                self._send(200, files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'})
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_comes_before_a_model_id_and_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OWNER/NAME is a model id unless a folder has that name. No other form is an id."""
    monkeypatch.chdir(tmp_path)

    assert is_hub_id("Qwen/Qwen3-0.6B")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_id("Qwen/Qwen3-0.6B")
    assert not is_hub_id("Qwen")
    for wrong in ("./Qwen/x", "../x", "/Qwen/x", "/x", "~/x", "~x/y", "gpt2", "a/b/c", "a/", "a/.b", "a b/c", ""):
        with pytest.raises(InvalidRequest, match="is not a folder; allowed: a folder, or a Hugging Face model id"):
            is_hub_id(wrong)


@pytest.mark.slow
def test_a_model_of_the_cache_is_served_under_its_id(tmp_path: Path) -> None:
    """Offline, workers load the snapshot of the cache. They refuse weights from any other folder of the cache."""
    snapshot = write_cache(tmp_path / "hf", write_checkpoint(tmp_path / "one", seed=1))
    other = write_checkpoint(tmp_path / "hf" / "hub" / "other", seed=2)
    env = hub_env(tmp_path / "hf", HF_HUB_OFFLINE="1")

    with running_up("--engine", "synthetic", "--model", ID, log=tmp_path / "log", env=env) as (_, info):
        status = json.loads(rollbus("status", "--json", nats=info["nats"]).stdout)
        refused = rollbus("update-weights", str(other), "--version", "1", nats=info["nats"])

    [worker] = status["workers"]
    assert (worker["model"], worker["model_path"]) == (ID, str(snapshot))
    assert refused.returncode == ExitCode.FAILED
    assert f"--model {ID}: not a folder; reading the model from Hugging Face" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_model_is_downloaded_once(tmp_path: Path) -> None:
    """The command downloads only the files that vLLM needs, and only once. Later runs work without the hub."""
    checkpoint = write_checkpoint(tmp_path / "one", seed=1)
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    env = hub_env(tmp_path / "hf")
    with serving_hub({**files, "pytorch_model.bin": b"again", "model.gguf": b"again"}) as (url, asked):
        with running_up(
            "--engine", "synthetic", "--model", ID, log=tmp_path / "log", env={**env, "HF_ENDPOINT": url}
        ) as (_, info):
            [worker] = json.loads(rollbus("status", "--json", nats=info["nats"]).stdout)["workers"]
        assert not any(path.endswith((".bin", ".gguf")) for path in asked)

    folder = Path(worker["model_path"])
    assert worker["model"] == ID
    assert folder.is_relative_to(tmp_path / "hf")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    with running_up("--engine", "synthetic", "--model", ID, log=tmp_path / "log", env={**env, "HF_ENDPOINT": url}) as (
        _,
        info,
    ):
        [again] = json.loads(rollbus("status", "--json", nats=info["nats"]).stdout)["workers"]
    assert again["model_path"] == worker["model_path"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "$HF_HUB_OFFLINE is set, and "),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached, and "),
    ],
)
@pytest.mark.parametrize("argv", [UP, ("worker", "--engine", "synthetic", "--model", ID)])
def test_a_model_that_cannot_be_downloaded_is_an_error_with_solutions(
    argv: tuple[str, ...], more: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """If the model cannot be downloaded, nothing starts. The error gives the id, the reason and both solutions."""
    done = rollbus(*argv, env=hub_env(tmp_path, **more))

    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    _, error = done.stderr.splitlines()
    assert error.startswith(
        f"rollbus: --model {ID} is not a folder, and cannot be downloaded from Hugging Face: {reason}"
    )
    assert "--model DIR" in error
    assert "$HF_HOME" in error


@pytest.mark.slow
def test_an_unknown_or_incomplete_model_is_refused(tmp_path: Path) -> None:
    """An unknown model and an incomplete model in the cache are errors."""
    with serving_hub({}) as (url, _):
        unknown = rollbus(*UP[:-1], "org/other", env=hub_env(tmp_path / "empty", HF_ENDPOINT=url))
    snapshot = write_cache(tmp_path / "hf", write_checkpoint(tmp_path / "one", seed=1))
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    partial = rollbus(*UP, env=hub_env(tmp_path / "hf", HF_HUB_OFFLINE="1"))

    assert (unknown.returncode, partial.returncode) == (ExitCode.FAILED, ExitCode.FAILED)
    assert f"{url} has no model of this id, or the model needs a token with access" in unknown.stderr
    assert f"{snapshot} has no weights" in partial.stderr
