"""`rollbus init`, `rollbus up --config`, and the completion of shells."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.app import build_parser, main
from rollbus.frontend.cli.exits import ExitCode


def parse(path: Path, text: str, *argv: str) -> Any:
    """Return the options of `rollbus up` with a file of settings."""
    path.write_text(text)
    return build_parser().parse_args(["up", *argv, "--config", str(path)])


def test_settings_of_a_file_are_options_and_the_command_line_takes_precedence(tmp_path: Path) -> None:
    """Each key is an option. An option of the command line replaces the setting, before and after --config."""
    text = """
        workers = 3
        start_timeout = "5m"
        stage-bytes = "2GiB"
        secure = true
        otel = false
        weight-root = ["/a", "/b"]
        nats = "nats://127.0.0.1:4000"
        [engine-args]
        max_model_len = 64
    """
    args = parse(tmp_path / "fleet.toml", text, "--workers", "1")
    assert (args.workers, args.start_timeout, args.stage_bytes, args.secure) == (1, 300.0, 2**31, True)
    assert (args.weight_root, args.engine_args, args.otel) == (["/a", "/b"], '{"max_model_len": 64}', False)
    assert (args.nats, args.is_nats_named) == ("nats://127.0.0.1:4000", True)
    assert build_parser().parse_args(["up", f"--conf={tmp_path / 'fleet.toml'}", "--workers", "9"]).workers == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrkers = 2", 'no setting "wrkers" (did you mean workers?)'),
        ("json = true", 'no setting "json"'),
        ('workers = "x"', "workers: 'x' is not an integer of at least 1"),
        ("workers = true", "workers is True; allowed: N"),
        ("secure = 1", "secure is 1; allowed: true or false"),
        ('engine = "vlm"', "engine is 'vlm'; allowed: vllm, synthetic"),
        ('start-timeout = "5q"', "start-timeout: '5q' is not a duration"),
        ("model = 2026-01-01", "allowed: DIR|ID"),
        ("x = [", "Invalid value"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the file, the key and the allowed values, and the exit code is that of wrong usage."""
    path = tmp_path / "fleet.toml"
    with pytest.raises(SystemExit) as ended:
        parse(path, text)
    error = capsys.readouterr().err
    assert ended.value.code == ExitCode.USAGE
    assert error.startswith(f"rollbus up: {path}: ")
    assert message in error


def test_a_missing_file_of_settings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read is an error with its name."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["up", "--config", str(tmp_path / "no.toml")])
    assert (
        capsys.readouterr().err
        == f"rollbus up: {tmp_path / 'no.toml'}: No such file or directory; `rollbus init` writes a file\n"
    )


def test_init_writes_every_option_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file changes nothing. With all comments removed, it sets every option to a valid value."""
    monkeypatch.setenv("ROLLBUS_NATS", "nats://user:secret@127.0.0.1:4222")
    path, unit, env = tmp_path / "fleet.toml", tmp_path / "fleet.service", tmp_path / "fleet.env"
    assert main(["init", str(path), "--systemd", str(unit), "--env", str(env)]) == ExitCode.OK
    text = path.read_text()
    assert tomllib.loads(text) == {}
    assert "secret" not in text
    settings = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2] not in (" ", ""))
    args = parse(tmp_path / "all.toml", settings)
    own = {"command", "default_of", "is_nats_named", "with_option_names", "config", "json", "verbose", "help"}
    # Each setting is an option, or the parser would have failed.
    assert len(tomllib.loads(settings)) == len(vars(args).keys() - own)
    assert f"up --config {path}" in unit.read_text()
    assert f"EnvironmentFile=-{env}" in unit.read_text()
    assert env.stat().st_mode & 0o777 == 0o600
    assert main(["init", str(path)]) == ExitCode.USAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_options_and_values(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of each shell has the commands, their options and the allowed values, and the shell can read it."""
    assert main(["completion", shell]) == ExitCode.OK
    script = capsys.readouterr().out
    for word in ("update-weights", "served-model-name", "synthetic"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
