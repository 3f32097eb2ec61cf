"""The command itself: its phases, its three forms of the result, and one run on a real engine."""

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from rollbus import GenerateRequest, Generation
from rollbus.frontend.cli.app import build_parser
from rollbus.frontend.cli.exits import INTERRUPTED, CommandFailed, ExitCode
from rollbus.frontend.cli.prove import command, evidence
from rollbus.frontend.cli.prove.report import Report, StageReport
from rollbus.frontend.cli.prove.stage import Budget, Proof, Stage, StageRefused
from rollbus.frontend.cli.prove.verdicts import Finding, Number, Outcome, Verdict, measured
from tests.prove.stages_support import answer


def parse(*words: str) -> argparse.Namespace:
    """Return the options of a command line, with the fleet that the command line would have."""
    args = build_parser().parse_args(["prove", *words])
    args.fleet = args.fleet or "default"
    return args


class Sound(Stage):
    name, bar = "sound", "both phases run"
    conclude_share: ClassVar[float] = 1.0

    async def measure(self, proof: Proof) -> Outcome | None:
        answer = await proof.rb.complete([1, 2, 3], max_tokens=4)
        assert proof.seconds_left() > 0
        lost = Number(name="lost", value=4 - len(answer.token_ids), limit=0.0, why="each token counts")
        return Outcome(findings=(measured("tokens", lost),))

    async def conclude(self, proof: Proof) -> Outcome | None:
        # The shared fleet has stopped.
        async with proof.own_fleet(num_workers=2) as fleet:
            found = Finding(verdict=Verdict.LOOK, what=f"{len(fleet.workers)} <workers>", causes=("a cause",))
        return Outcome(findings=(found,), headline="two & more")


class Broken(Stage):
    name, bar = "broken", "no request fails"

    async def measure(self, proof: Proof) -> Outcome | None:
        raise OSError("the disk is gone")


class Unable(Stage):
    name, bar = "unable", "it can run"

    async def measure(self, proof: Proof) -> Outcome | None:
        raise StageRefused("there is no GPU")


class Slow(Stage):
    name, bar = "slow", "it ends in time"
    measure_share: ClassVar[float] = 1e-9

    async def measure(self, proof: Proof) -> Outcome | None:
        await proof.rb.fleet.wait_for_workers(99)
        return None


class Changing(Stage):
    name, bar = "changing", "it changes weights"
    changes_fleet: ClassVar[bool] = True


def reason_of(stage: StageReport) -> str:
    """Return the text of the first finding with the stage's verdict."""
    return next(finding.what for finding in stage.findings if finding.verdict is stage.verdict)


@pytest.mark.slow
async def test_stages_end_with_one_of_four_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures are `wrong`, all else that does not run has a reason, and all three forms have the verdicts."""
    monkeypatch.setattr(command, "STAGES", (Sound, Broken, Unable, Slow))
    monkeypatch.delenv("ROLLBUS_NATS", raising=False)
    files = [tmp_path / "prove.json", tmp_path / "prove.svg"]
    options = ("--engine", "synthetic", "--state-dir", str(tmp_path / "state"), "--json")
    args = parse("--model", str(tmp_path), str(files[0]), "--picture", str(files[1]), *options)

    code = await command.run(args)

    assert code == ExitCode.FAILED
    report = msgspec.json.decode(files[0].read_bytes(), type=Report)
    words = {stage.stage: (stage.verdict, reason_of(stage)) for stage in report.stages}
    assert words["sound"] == (Verdict.LOOK, "2 <workers>")
    assert words["broken"] == (Verdict.WRONG, "the fleet failed: the disk is gone")
    assert words["unable"] == (Verdict.NOT_RUN, "there is no GPU")
    assert words["slow"][0] is Verdict.NOT_RUN
    assert "--minutes" in words["slow"][1]
    assert report.verdict is Verdict.WRONG
    assert report.is_own
    table = capsys.readouterr().out
    assert all(f"{name}" in table and str(word) in table for name, (word, _) in words.items())
    assert "likely cause: a cause" in table
    texts = " ".join(element.text or "" for element in ElementTree.parse(files[1]).iter())
    assert "2 <workers>" in texts
    assert "two & more" in texts


class Endless(Stage):
    name, bar = "endless", "it ends"

    async def measure(self, proof: Proof) -> Outcome | None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(3600)
        return None


@pytest.mark.slow
async def test_a_signal_ends_with_the_table_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C the table has what was measured, and what was not, and the exit code is that of shells."""
    monkeypatch.setattr(command, "STAGES", (Broken, Endless, Unable))
    monkeypatch.delenv("ROLLBUS_NATS", raising=False)
    options = ("--engine", "synthetic", "--state-dir", str(tmp_path / "state"), "--json")

    code = await command.run(parse("--model", str(tmp_path), *options))

    assert code == INTERRUPTED
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert [stage.verdict for stage in report.stages] == [Verdict.WRONG, Verdict.NOT_RUN, Verdict.NOT_RUN]
    assert {reason_of(stage) for stage in report.stages[1:]} == {"the command was stopped before its end"}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ('{"prompt_token_ids": [5, -1]}', "line 1"),
        ('{"prompt_token_ids": [5], "lora": "mine"}', "row 1 names the adapter mine; no reference has it"),
        ("", "has no rows; expected one for each prompt"),
    ],
)
def test_a_wrong_row_is_told_before_a_fleet_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, problem: str
) -> None:
    """The rows of --prompts are checked before anything runs."""
    monkeypatch.delenv("ROLLBUS_NATS", raising=False)
    (tmp_path / "rows.jsonl").write_text(rows)
    options = ("--engine", "synthetic", "--state-dir", str(tmp_path), "--prompts", str(tmp_path / "rows.jsonl"))
    with pytest.raises(CommandFailed, match=problem) as failed:
        _ = command.run(parse("--model", str(tmp_path), *options))
    assert failed.value.exit_code == ExitCode.USAGE


def test_an_unknown_stage_is_an_error_of_usage() -> None:
    """--stages rejects a name and lists the allowed ones."""
    with pytest.raises(CommandFailed, match="no stage 'nope'; allowed: sound, broken") as failed:
        command.choose_stages([Sound(), Broken()], ["nope"])
    assert failed.value.exit_code == ExitCode.USAGE


def test_phases_share_the_minutes() -> None:
    """A phase gets its part of what is left, so the time that one saves is left to the others."""
    now = [0.0]
    budget = Budget(60.0, [1.0, 1.0, 2.0], lambda: now[0])
    assert budget.begin(1.0) == 15.0
    now[0] = 6.0
    assert budget.left_s() == 9.0
    assert budget.begin(1.0) == 18.0
    now[0] = 70.0
    assert budget.begin(2.0) == 0.0
    assert budget.left_s() == 0.0


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1441", "ten"])
def test_minutes_have_bounds(text: str) -> None:
    """--minutes is a number above 0 and up to a day."""
    with pytest.raises(SystemExit):
        parse("--model", "m", "--minutes", text)
    assert parse("--model", "m", "--minutes", "0.5").minutes == 0.5


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing program does not cost the result of a run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command._commit() is None


async def test_an_answer_without_room_for_a_second_pass_shifts_no_other() -> None:
    """An answer that ends at the model's length has no second pass. The others keep their own."""

    class Bus:
        async def complete_many(self, requests: list[GenerateRequest], max_in_flight: int) -> AsyncIterator[Generation]:
            for request in requests:
                second = None
                if request.sampling.prompt_logprobs is not None:
                    second = np.full(request.prompt_len - 1, -float(request.prompt_len), "f4")
                given: dict[str, Any] = {
                    "request": request,
                    "request_id": request.request_id,
                    "prompt_len": request.prompt_len,
                }
                yield replace(answer([7, 8]), **given, prompt_logprobs=second)

    engine = SimpleNamespace(
        max_model_len=6, routed_experts=None, routing_refusal=None, logprobs_mode="raw_logprobs", max_logprobs=20
    )
    fields = {"fleet": SimpleNamespace(engine=engine), "args": argparse.Namespace(seed=0), "dtype": "float32"}
    proof: Any = SimpleNamespace(**fields, model="m", rb=Bus())
    collection = evidence._Collection(proof)

    await collection._send("alone", 0, [GenerateRequest(prompt_token_ids=[5] * n) for n in (4, 3, 2)], 1)

    seconds = [None if one.second is None else one.second.tolist() for one in collection._evidence.sampled]
    assert seconds == [None, [-5.0] * 4, [-4.0] * 3]


@pytest.mark.vllm
@pytest.mark.routing
async def test_a_sound_worker_is_ok(
    nats_url: str,
    real_fleet: str,
    tiny_moe_float32: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A worker in float32 agrees with transformers: no row differs, and a fleet in use is not changed."""
    monkeypatch.setattr(evidence, "MAX_ROUNDS", 1)
    monkeypatch.setattr(command, "STAGES", (*command.STAGES[:2], Changing))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": [seed + 17, 42, 99] * 30, "max_tokens": 8} for seed in range(3)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    options = ("--nats", nats_url, "--fleet", real_fleet, "--state-dir", str(tmp_path), "--prompts", str(prompts))

    code = await command.run(parse("--model", str(tiny_moe_float32), *options, "--minutes", "60", "--json"))

    out: Any = json.loads(capsys.readouterr().out)
    stages = {stage["stage"]: stage for stage in out["stages"]}
    assert code == ExitCode.OK, [finding for stage in out["stages"] for finding in stage["findings"]]
    assert stages["routing"]["details"]["faults_with_replay"] == [0.0] * 4
    assert stages["agreement"]["details"]["reference"]["p99"] < 1e-3
    texts = [finding["what"] for finding in stages["agreement"]["findings"]]
    assert any("your prompts with your sampling" in text for text in texts)
    assert any(text.startswith("reference, sampled tokens") for text in texts)
    assert stages["changing"]["verdict"] == "not run"
    assert "--disruptive" in stages["changing"]["findings"][0]["what"]
    assert out["reference"].startswith("transformers")
