"""The commands together, with a real NATS server. The engine is synthetic, because the engine is not under test."""

import json
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.cli.exits import ExitCode
from tests.cli.support import ENV, command, on_terminal, processes_with, rollbus, running_up, serves
from tests.support.processes import becomes_true

pytestmark = pytest.mark.slow


def write(path: Path, *lines: dict[str, object]) -> Path:
    """Write an input file with these lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results of an output file by index, and check that each index occurs once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    results = {line["index"]: line for line in lines}
    assert len(results) == len(lines)
    return results


def generate(nats: str, path: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """Run `rollbus generate --json` on `path`. Return exit code, report and stderr."""
    output = path.with_name("out.jsonl")
    done = rollbus("generate", "--input", str(path), "--output", str(output), "--json", *args, nats=nats)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_status_shows_the_workers(nats: str) -> None:
    """`status` prints a row per worker, per queue and per group of equal engines. With --json, it prints one line."""
    table, as_json = rollbus("status", nats=nats), rollbus("status", "--json", nats=nats)

    assert (table.returncode, table.stderr) == (0, "")
    workers, engines, *_ = table.stdout.split("\n\n")  # a service of another test's file may follow
    assert [line.split()[:3] for line in workers.splitlines()] == [
        ["state", "worker", "model"],
        ["serving", "local-0", "synthetic"],
        ["serving", "local-1", "synthetic"],
    ]
    assert "local-0, local-1" in engines
    assert max(map(len, table.stdout.splitlines())) <= 80
    [line] = as_json.stdout.splitlines()
    assert [worker["worker"] for worker in json.loads(line)["workers"]] == ["local-0", "local-1"]
    assert {queue["lane"] for queue in json.loads(line)["queues"]} == {"resume", "high", "normal", "low"}


def test_status_watch_scrolls_a_terminal_in_place(nats: str) -> None:
    """On a small screen, `status --watch` cuts nothing: keys scroll. Ctrl-C exits with 0 and leaves the last tables."""
    with on_terminal("status", "--watch", "--nats", nats, size=(80, 6)) as terminal:
        terminal.read_until("lines 1 to 5 of 10", times=2)
        terminal.press(b"\x1b[F")
        terminal.read_until("lines 6 to 10 of 10")
        terminal.press_ctrl_c()
        code = terminal.read_to_end()

    assert code == ExitCode.OK
    left = terminal.text.rpartition("\x1b[?1049l")[2].splitlines()
    assert sum("local-0" in line and "serving" in line for line in left) == 1


@pytest.mark.parametrize(("options", "fleet"), [(("--json",), "default"), ((), "nobody")])
def test_status_watch_writes_state_after_state_into_a_pipe(nats: str, options: tuple[str, ...], fleet: str) -> None:
    """Into a pipe, `status --watch` writes state after state, also of an empty fleet, and Ctrl-C exits with 0."""
    args = ("status", "--watch", "--fleet", fleet, *options)
    first = '{"' if options else f"fleet {fleet} at "
    with subprocess.Popen(
        command(*args), env={**ENV, "ROLLBUS_NATS": nats}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        num_states = 0
        while num_states < 2:
            num_states += process.stdout.readline().startswith(first)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()

    assert (process.returncode, stderr) == (ExitCode.OK, "")


def test_status_watch_ends_if_its_reader_closes_the_pipe(nats: str) -> None:
    """`status --watch` ends if its reader closes the pipe, as in `status --watch --json | head -1`."""
    with subprocess.Popen(
        command("status", "--watch", "--json"), env={**ENV, "ROLLBUS_NATS": nats}, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == ExitCode.OK


def test_an_empty_fleet_gives_exit_code_5(nats: str, tmp_path: Path) -> None:
    """Without workers, a command sends nothing and exits with code 5 and one line that names fleet and server."""
    status, as_json = (rollbus("status", "--fleet", "nobody", *more, nats=nats) for more in ((), ("--json",)))
    path = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1]})
    code, _, stderr = generate(nats, path, "--fleet", "nobody")

    assert (status.returncode, as_json.returncode, code) == (ExitCode.NO_WORKERS,) * 3
    for line in (status.stderr, as_json.stderr, stderr):
        assert "fleet nobody " in line
        assert nats in line
        assert line.count("\n") == 1
    nothing: dict[str, object] = {"workers": [], "queues": [], "queue_problems": {}, "desired": {}}
    assert json.loads(as_json.stdout) == {"fleet": "nobody", **nothing}


def test_every_prompt_gets_its_result(nats: str, tmp_path: Path) -> None:
    """Each prompt gets one result with tokens, logprobs and rows by the row rule, and the report counts them."""
    prompts: list[dict[str, object]] = [
        {"prompt_token_ids": list(range(1, i + 2)), "max_tokens": i % 7 + 1, "ignore_eos": True} for i in range(50)
    ]
    path = write(tmp_path / "in.jsonl", *prompts)

    code, report, stderr = generate(nats, path, "--routed-experts", "npz", "--max-in-flight", "8")

    assert (code, stderr) == (0, "")
    assert (report["done"], report["failed"], report["tokens"]) == (50, 0, sum(i % 7 + 1 for i in range(50)))
    results = read(tmp_path / "out.jsonl")
    assert sorted(results) == list(range(50))
    with np.load(report["npz"]) as arrays:
        for i, line in results.items():
            assert len(line["token_ids"]) == len(line["logprobs"]) == len(line["weight_versions"]) == i % 7 + 1
            assert (line["prompt_len"], line["finish_reason"], line["attempts"]) == (i + 1, "length", 1)
            described = line["routed_experts"]
            rows = arrays[described["key"]]
            assert list(rows.shape) == described["shape"] == [i + 1 + i % 7, 4, 4]
            assert (rows.dtype, described["dtype"], described["start"]) == (np.uint8, "u1", 0)


def test_a_killed_run_is_continued(nats: str, tmp_path: Path) -> None:
    """After SIGKILL, the same command finishes the run with each prompt and each array exactly once."""
    path = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [i + 1], "max_tokens": 50} for i in range(400)))
    output = tmp_path / "out.jsonl"
    args = ("--input", str(path), "--output", str(output), "--routed-experts", "npz", "--max-in-flight", "2")
    process = subprocess.Popen(command("generate", *args), env={**ENV, "ROLLBUS_NATS": nats})
    assert becomes_true(lambda: output.exists() and output.read_bytes().count(b"\n") > 50)
    process.kill()
    process.wait()
    kept = output.read_bytes().count(b"\n")
    assert kept < 400

    code, report, stderr = generate(nats, path, "--routed-experts", "npz")

    assert (code, stderr) == (0, "")
    assert (report["resumed"], report["done"]) == (kept, 400 - kept)
    results = read(output)
    assert sorted(results) == list(range(400))
    with np.load(tmp_path / "out.npz") as arrays:
        assert len(arrays.files) == 400
        assert all(list(arrays[line["routed_experts"]["key"]].shape) == line["routed_experts"]["shape"] for line in
                   list(results.values())[::50])  # fmt: skip
    assert generate(nats, path, "--routed-experts", "npz")[1]["done"] == 0


def test_a_terminal_shows_a_bar_for_each_step_of_the_run(nats: str, tmp_path: Path) -> None:
    """A bar names each step of the run and disappears at the end.

    After Ctrl-C, the exit code is 130, the count includes earlier runs, and the .npz is complete.
    """
    path = write(tmp_path / "in.jsonl", *({"prompt_token_ids": [i + 1], "max_tokens": 50} for i in range(5000)))
    output = tmp_path / "out.jsonl"
    args = ("--input", str(path), "--output", str(output), "--max-in-flight", "16", "--routed-experts", "npz")
    counts = [0]
    for _ in range(2):
        with on_terminal("generate", *args, "--nats", nats) as terminal:
            for words in ("checking the prompts", "connecting", "generating", " tokens/s", " left"):
                terminal.read_until(words)
            terminal.press_ctrl_c()
            code = terminal.read_to_end()
        counts.append(len(read(output)))

        assert code == 130
        assert terminal.lines()[-1] == f"rollbus: {counts[-1]:,} of 5,000 done; the same command continues"
        assert [line for line in terminal.lines() if "tokens/s" in line] == []
    assert counts == sorted(set(counts))
    with np.load(tmp_path / "out.npz") as arrays:
        assert {int(key) for key in arrays} >= set(read(output))


def test_text_needs_a_tokenizer(nats: str, tmp_path: Path) -> None:
    """A text prompt without a local tokenizer is a usage error that names the option to pass."""
    path = write(tmp_path / "in.jsonl", {"prompt": "hello"})

    code, _, stderr = generate(nats, path)

    assert code == ExitCode.USAGE
    assert "--tokenizer DIR" in stderr


def test_a_worker_started_by_hand_joins_and_stops(nats: str) -> None:
    """`rollbus worker` serves under its id and exits with code 0 after SIGTERM."""
    worker = subprocess.Popen(
        command("worker", "--engine", "synthetic", "--worker-id", "by-hand", "--fleet", "hand"),
        env={**ENV, "ROLLBUS_NATS": nats},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert serves(nats, fleet="hand")
        assert "serving  by-hand  synthetic" in rollbus("status", "--fleet", "hand", nats=nats).stdout
    finally:
        worker.terminate()

    assert worker.wait() == 0


def is_replaced(worker: str, pid: int, nats: str) -> bool:
    """Return True if another process serves as `worker`."""
    return processes_with(f"--worker-id {worker}", nats) not in ([], [pid])


def test_up_restarts_a_dead_worker_and_stops_in_order(tmp_path: Path) -> None:
    """`up` reports each dead worker in one line and restarts it, even the last one, and serves waiting requests.

    SIGTERM stops it with exit code 0. Stdout has one line of JSON, stderr has the workers' logs and states.
    """
    log = tmp_path / "log"
    with running_up("--engine", "synthetic", "--workers", "2", log=log) as (process, info):
        nats = info["nats"]
        assert (info["http"].startswith("http://127.0.0.1:"), info["workers"]) == (True, ["local-0", "local-1"])
        assert len(processes_with(nats)) == 2
        for worker in ("local-1", "local-0"):
            (pid,) = processes_with(f"--worker-id {worker}", nats)
            os.kill(pid, signal.SIGKILL)
            assert becomes_true(partial(is_replaced, worker, pid, nats))
            [line] = [line for line in log.read_text().splitlines() if line.startswith(f"[{worker}] was killed")]
            assert (
                "was killed by SIGKILL (out of memory? `dmesg` shows it); workers left: 1; started again in 1 s" in line
            )
        path = write(tmp_path / "in.jsonl", {"prompt_token_ids": [1], "max_tokens": 2})
        assert generate(nats, path)[1]["done"] == 1
        assert serves(nats, 2)
        assert process.poll() is None
        process.terminate()
        assert process.stdout.read() == ""

    assert process.returncode == 0
    assert processes_with(nats) == []
    assert "[local-0] " in log.read_text()
    assert re.search(r"^local-0  serving  \d+ s$", log.read_text(), re.MULTILINE)
    assert log.read_text().endswith("stopped\n")


@pytest.mark.proves("P1")
def test_up_starts_workers_again_that_a_rolling_restart_ended(tmp_path: Path) -> None:
    """`drain --all --one-by-one` replaces each worker of `up` by a new process; a fleet of one needs --allow-none."""
    log = tmp_path / "log"
    with running_up("--engine", "synthetic", "--workers", "2", log=log) as (process, info):
        nats = info["nats"]
        pids = {worker: processes_with(f"--worker-id {worker}", nats) for worker in info["workers"]}
        done = rollbus("drain", "--all", "--one-by-one", "--json", nats=nats)
        shown = {each["worker"]: each["result"] for each in json.loads(done.stdout)["workers"]}
        assert (done.returncode, shown) == (0, dict.fromkeys(info["workers"], "applied")), done.stdout
        for worker in info["workers"]:
            [pid] = processes_with(f"--worker-id {worker}", nats)
            assert [pid] != pids[worker]
            assert f"[{worker}] ended with exit code 0; workers left: 1; started again in 1 s" in log.read_text()
        assert rollbus("status", nats=nats).stdout.count("serving") == 2
        assert rollbus("drain", "local-1", nats=nats).returncode == 0
        refused = rollbus("drain", "local-0", "--one-by-one", nats=nats)
        assert refused.returncode == 2
        assert "--allow-none is not set, and no other worker serves 'synthetic'" in refused.stderr
        assert rollbus("drain", "--all", "--one-by-one", "--allow-none", nats=nats).returncode == 0
        # A recorded drain stays: the worker comes back in the state that it had.
        assert "drained" in rollbus("status", nats=nats).stdout
        assert process.poll() is None


def test_up_reports_the_error_of_a_worker_that_fails_to_start(tmp_path: Path) -> None:
    """If a worker fails to start, `up` reports the worker's error message and prints nothing on stdout."""
    done = rollbus(
        "up", "--engine", "synthetic", "--engine-args", '{"speed": 9}', "--nats", "nats://127.0.0.1:0", "--json"
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "worker local-0 ended with exit code 2" in done.stderr
    assert "speed" in done.stderr.splitlines()[-1]
