"""`rollbus record` shows a record and draws its picture; `rollbus generate --record` writes one."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rollbus import RunRecorder
from rollbus.frontend.cli.app import main
from rollbus.schemas.options import pip_install
from tests.bus.record.test_rows import generation


def test_the_record_is_shown_with_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints counts and problems, and writes an SVG."""
    run, svg = tmp_path / "run", tmp_path / "run.svg"
    with RunRecorder(run) as recorder:
        for number in range(40):
            sample = generation(number)
            recorder.add(sample, newest_version=number // 10)
            recorder.score(sample, reward=number / 40)
    assert main(["record", str(run), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == "40 samples, 40 with a reward; 160 tokens in 39.5 s\n"
    text = svg.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "<!-- 40 samples, 160 tokens, 3 updates of the weights -->" in text

    (run / "samples-other-00000.arrow").write_bytes(b"torn")
    assert main(["record", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["torn_bytes"]) == (40, 4)
    assert report["problems"] == ["samples-other-00000.arrow: 4 bytes after the last whole batch are not readable"]


def test_an_empty_record_is_drawn(tmp_path: Path) -> None:
    """A run without samples gives a picture without lines."""
    RunRecorder(tmp_path / "run").close()
    assert main(["record", str(tmp_path / "run"), "--svg", str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").exists()


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory without a record, and a missing package, are errors that name the remedy."""
    assert main(["record", str(tmp_path)]) == 2
    assert "which has no record of a run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["record", str(tmp_path), "--svg", "run.svg"]) == 1
    assert "--svg requires matplotlib, which is not installed" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["record", str(tmp_path)]) == 2
    assert f"record needs pyarrow, which is not installed; allowed: {pip_install('data')}" in capsys.readouterr().err
