import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rollbus import __version__
from rollbus.frontend.cli import arguments
from rollbus.frontend.cli.app import build_parser, main
from rollbus.frontend.cli.exits import CommandFailed, ExitCode, cause_of, exit_code_of
from rollbus.schemas.errors import BusBroken, InvalidRequest, NoWorkers, RequestTimeout
from tests.cli.support import ROOT, rollbus

COMMANDS = (
    *("abort", "auth", "bench", "cancel-transfer", "completion", "demo", "doctor", "drain", "experts", "flush-cache"),
    *("forget-model", "frontend"),
    *(
        "generate",
        "init",
        "lend",
        "load-lora",
        "make-queue",
        "nats",
        "pause",
        "prove",
        "publish-weights",
        "ray",
        "record",
        "requests",
    ),
    *("reset", "resume", "return"),
    *("sign", "sleep", "status", "top", "trace", "unload-lora", "up"),
    *("update-weights", "wake", "weights", "why", "worker"),
)
NEEDED = {
    "abort": ["id"],
    "auth": ["init", "--dir", "d"],
    "completion": ["bash"],
    "drain": ["worker"],
    "forget-model": ["m"],
    "generate": ["--input", "a", "--output", "b"],
    "lend": ["w0"],
    "load-lora": ["name", "path"],
    "make-queue": ["m"],
    "nats": ["init"],
    "publish-weights": ["d", "--version", "1"],
    "ray": ["up"],
    "record": ["d"],
    "return": ["w0"],
    "trace": ["r"],
    "unload-lora": ["name"],
    "update-weights": ["path"],
}
"""The arguments that some commands require."""
HEAVY = ("nats", "rich", "starlette", "torch", "transformers", "uvloop", "vllm")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`rollbus --help` lists the commands, each with a line of help, and the exit codes."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert re.findall(r"^    (\S+)", out, re.MULTILINE) == list(COMMANDS)
    assert "5 no workers" in out


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_help_ends_with_examples(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Each help ends with two to four command lines that parse. At least one of them calls the command itself."""
    with pytest.raises(SystemExit):
        main([*filter(None, [command]), "--help"])

    lines = capsys.readouterr().out.rpartition("\nexamples:\n")[2].splitlines()
    shown = [words_of_rollbus(line) for line in lines]
    assert 2 <= len(lines) <= 4
    for words in filter(None, shown):
        build_parser().parse_args(words if words[0] != "help" else [*words[1:], *NEEDED[words[1]]])
    assert command is None or any(words[0] == command for words in shown if words)


def words_of_rollbus(line: str) -> list[str]:
    """Return the arguments of `rollbus` in a shell line, or an empty list if the line runs another program."""
    words = [word for word in shlex.split(line, comments=True) if "=" not in word or word.startswith("-")]
    assert words[0] in {"rollbus", "echo", "curl"}
    return words[1:] if words[0] == "rollbus" else []


def test_a_help_names_the_common_options_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of a command lists the common options in one line. Only `rollbus --help` describes them."""
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    short = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    full = capsys.readouterr().out

    assert "\n  --nats --fleet --creds --tls-ca --tls-cert --tls-key --replicas --json --log-format -v\n" in short
    assert "ROLLBUS_NATS" in full
    assert "ROLLBUS_NATS" not in short


def test_help_command_prints_the_same_text_as_the_help_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`rollbus help pause` prints the same text as `rollbus pause --help`."""
    outs = []
    for argv in (["help", "pause"], ["pause", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        outs.append(capsys.readouterr().out)

    assert outs[0] == outs[1]


@pytest.mark.slow
def test_help_imports_no_slow_module() -> None:
    """`rollbus --help` imports no slow module, so it answers immediately and works without the extras."""
    code = f"""
import sys
from rollbus.frontend.cli.app import build_parser
build_parser().format_help()
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("auth remove --dir {0} --trainer bob --listen 0.0.0.0:4333", "--listen"),
        ("auth certify --dir {0} a.creds --worker w0", "--worker"),
        ("auth certify --dir {0} a.creds --fleet f", "--fleet"),
        ("auth init --dir {0} --nats nats://h:1", "--nats"),
        ("nats init --dir {0} --nodes a,b,c --nats nats://h:1", "--nats"),
        ("demo --nats nats://h:1", "--nats"),
        ("worker --engine synthetic --json", "--json"),
        ("top --once --interval 2", "--interval"),
        ("top --json --interval 2", "--interval"),
        ("experts --json --plane prompt", "--plane"),
        ("update-weights {0} --check --version 2", "--version"),
        ("update-weights {0} --check --mode wait", "--mode"),
        ("update-weights {0} --check --allow-rollback", "--allow-rollback"),
        ("update-weights {0} --check --min-staged 1", "--min-staged"),
        ("update-weights {0} --check --expected-canary {0}", "--expected-canary"),
        ("publish-weights {0} --version 1 --store-only --min-staged 1", "--min-staged"),
    ],
)
def test_options_without_an_effect_are_refused(
    line: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that only another action or mode of its command uses is a usage error, and nothing is written."""
    assert main(line.format(tmp_path).split()) == ExitCode.USAGE
    assert option in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_accepts_the_common_options(command: str) -> None:
    """The options --nats, --fleet, --json and -v have the same meaning in each command."""
    args = build_parser().parse_args(
        [command, *NEEDED.get(command, []), "--nats", "nats://h:1", "--fleet", "f", "--json", "-v"]
    )

    assert (args.nats, args.fleet, args.json, args.verbose) == ("nats://h:1", "f", True, True)


def test_the_address_of_nats_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """$ROLLBUS_NATS is the default of --nats. Without the variable, the default is the server of this machine."""
    monkeypatch.setenv("ROLLBUS_NATS", "nats://somewhere:1")
    assert build_parser().parse_args(["status"]).nats == "nats://somewhere:1"
    monkeypatch.delenv("ROLLBUS_NATS")
    assert build_parser().parse_args(["status"]).nats == "nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    "argv",
    [
        ["pause", "--timeout-s", "0"],
        ["update-weights", "a", "--version", "-1"],
        ["update-weights", "a", "--version", "1", "--upload", "--objects"],
        ["abort"],
        ["drain", "w", "--worker", "w"],
        ["up", "--workers", "0"],
        ["up", "--engine-args", "dtype=float32"],
        ["up", "--engine-args", "[1]"],
        ["generate", "--input", "a", "--output", "b", "--timeout-s", "inf"],
        ["bench", "--logprobs", "all"],
    ],
)
def test_wrong_arguments_are_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A usage error gives exit code 2, one line on stderr and nothing on stdout."""
    with pytest.raises(SystemExit) as caught:
        main(argv)

    captured = capsys.readouterr()
    assert caught.value.code == ExitCode.USAGE
    assert captured.err.startswith("rollbus")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command, the help goes to stderr, and the exit code is 2."""
    assert main([]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (build_parser().format_help(), "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["stauts"], 'rollbus: no command "stauts" (did you mean status?)'),
        (["update_weights"], 'rollbus: no command "update_weights" (did you mean update-weights?)'),
        (["halt"], 'rollbus: no command "halt"; rollbus --help lists them'),
        (["pause", "--modle", "m"], 'rollbus pause: no option "--modle" (did you mean --model?)'),
        (["pause", "--modle=m"], 'rollbus pause: no option "--modle" (did you mean --model?)'),
        (["pause", "--xyz"], 'rollbus pause: no option "--xyz"; rollbus pause --help lists them'),
        (["pause", "-x"], 'rollbus pause: no option "-x"'),
        (
            ["generate", "--inptu", "a", "--output", "b"],
            'rollbus generate: no option "--inptu" (did you mean --input?)',
        ),
        (["frontend", "--port", "80"], 'rollbus frontend: no option "--port" (did you mean --http?)'),
        (["generate", "--field", "x"], 'rollbus generate: no option "--field" (did you mean --prompt-field?)'),
        (["up", "--root", "/w"], 'rollbus up: no option "--root" (did you mean --weight-root?)'),
        (["--nats", "nats://h", "status"], 'rollbus: no option "--nats"; options follow the command'),
        (["--versoin"], 'rollbus: no option "--versoin" (did you mean --version?)'),
        (
            ["pause", "--mode", "kepe"],
            'rollbus pause: --mode: no "kepe" (did you mean keep?); allowed: abort, wait, keep',
        ),
        (["sleep", "--level", "3"], 'rollbus sleep: --level: no "3"; allowed: 1, 2'),
        (
            ["auth", "inti", "--dir", "d"],
            'rollbus auth: action: no "inti" (did you mean init?); allowed: init, remove, certify',
        ),
        (["status", "more"], 'rollbus status: one argument too many: "more"'),
        (["up", "org/m"], 'rollbus up: one argument too many: "org/m"; did you mean --model org/m?'),
        (["pause", "a"], 'rollbus pause: one argument too many: "a"; did you mean --model a or --worker a?'),
        (
            ["generate", "--output", "b"],
            "rollbus generate: the following arguments are required: --input; rollbus generate --help has examples",
        ),
    ],
)
def test_a_misspelled_name_gets_the_nearest_name(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command, option or value gets the nearest name, or a hint where to find the allowed names.

    The one option that has the word in its name, or else in its placeholder, is nearer than all others.
    """
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == ExitCode.USAGE
    assert capsys.readouterr().err == f"{message}\n"


def test_abbreviated_options_and_values_after_dashes_are_accepted() -> None:
    """The parser still accepts beginnings of options, negative numbers, and all arguments that follow `--`."""
    args = build_parser().parse_args(["generate", "--inp", "a", "--output=--b", "--temperature", "-1"])
    assert (args.input, args.output, args.temperature) == ("a", Path("--b"), -1)
    assert build_parser().parse_args(["abort", "--", "--id"]).request_ids == ["--id"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--http", "8000"], "--http 8000: allowed is HOST:PORT"),
        (["frontend", "--http", "127.0.0.1:99999"], "--http 127.0.0.1:99999: allowed is HOST:PORT"),
        (["up", "--model", "no-such-folder"], "is not a folder"),
        (["up", "--nats", "nats://10.0.0.1:4222"], "its own NATS server"),
        (["up", "--nats", "nats://127.0.0.1:99999"], "out of range"),
        (["up", "--nats", "127.0.0.1:4222,127.0.0.1:4223"], "its own NATS server"),
        (
            ["generate", "--input", "no-such-file", "--output", "o"],
            "does not exist; a data set on the Hub is OWNER/NAME",
        ),
        (["generate", "--input", __file__, "--output", "no-such-folder/o"], "no-such-folder is not a directory"),
        (["generate", "--input", __file__, "--output", __file__], "are the same file"),
        (["generate", "--input", __file__, "--output", "o.npz", "--routed-experts", "npz"], "must not end with .npz"),
        (["demo", "--input", "no-such-file"], "no file "),
    ],
)
def test_mistakes_found_on_the_machine_are_usage_errors_of_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mistakes that need a check of the machine are usage errors too.

    The command then starts nothing and creates no file.
    """
    monkeypatch.chdir(tmp_path)

    assert main(argv) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_missing_nats_server_is_reported_in_one_line() -> None:
    """Without -v, a missing NATS server gives one line without a traceback.

    With -v, the traceback comes before that line.
    """
    quiet, verbose = rollbus("status"), rollbus("status", "-v")

    assert (quiet.returncode, verbose.returncode) == (ExitCode.FAILED, ExitCode.FAILED)
    assert len(quiet.stderr.splitlines()) == 1
    assert "no NATS server at nats://127.0.0.1:9" in quiet.stderr
    assert "Traceback" in verbose.stderr
    assert verbose.stderr.splitlines()[-1] == quiet.stderr.strip()


@pytest.mark.slow
def test_an_unexpected_error_is_reported_in_one_line() -> None:
    """An unexpected error gives exit code 1 and one line with the error and a hint how to see the traceback."""
    code = """
import sys
from rollbus.frontend.cli import app
from rollbus.frontend.cli.arguments import COMMANDS
def run(args): raise ExceptionGroup("", [ExceptionGroup("", [ZeroDivisionError("of mine")])])
COMMANDS["status"] = COMMANDS["status"]._replace(run=run)
sys.exit(app.main(["status"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr == "rollbus: internal error, run again with -v for the traceback: ZeroDivisionError('of mine')\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandFailed("x", ExitCode.TIMEOUT), ExitCode.TIMEOUT),
        (InvalidRequest(field="f", problem="p", allowed="a"), ExitCode.USAGE),
        (NoWorkers(message="x"), ExitCode.NO_WORKERS),
        (RequestTimeout(stage="admission", message="x"), ExitCode.TIMEOUT),
        (TimeoutError(), ExitCode.TIMEOUT),
        (BusBroken("x"), ExitCode.FAILED),
        (FileNotFoundError("x"), ExitCode.FAILED),
    ],
)
def test_errors_have_their_exit_codes(error: CommandFailed | OSError, code: ExitCode) -> None:
    """Each kind of error ends a command with its own exit code."""
    assert exit_code_of(error) == code


def test_an_error_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control characters in the words of a worker are shown as text. Its lines stay lines."""

    def run(_args: object) -> int:
        raise CommandFailed("its last lines:\n  \x1b[2J\x9b")

    monkeypatch.setitem(arguments.COMMANDS, "status", arguments.COMMANDS["status"]._replace(run=run))
    assert main(["status"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "rollbus: its last lines:\n  \\x1b[2J\\x9b\n"


def test_the_cause_is_shown_before_its_consequences() -> None:
    """If several errors are raised, the command reports the error that it raised itself.

    It never hides a bug among them.
    """
    cause, consequence = CommandFailed("worker died"), BusBroken("gone")

    assert cause_of(ExceptionGroup("", [ExceptionGroup("", [consequence]), cause])) is cause
    assert cause_of(ExceptionGroup("", [consequence])) is consequence
    assert cause_of(ExceptionGroup("", [cause, ZeroDivisionError()])) is None


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`rollbus --version` and `rollbus.__version__` equal the version of the installed distribution."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rollbus {__version__}\n"
    assert version("rollbus") == __version__


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_missing_vllm_is_reported_with_the_package_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without vLLM, `up` and `demo` report before they start anything how to install it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    options = ["--nats", "nats://127.0.0.1:0"] if command == "up" else []
    assert main([command, *options]) == ExitCode.FAILED
    assert capsys.readouterr().err.startswith("rollbus: vLLM is not installed: pip install ")


def test_errors_name_options_and_not_python_arguments() -> None:
    """An error text names `--allow-rollback` and not `allow_rollback`, and leaves all other words as they are."""
    args = build_parser().parse_args(["update-weights", "/x", "--version", "1"])

    assert args.with_option_names("workers names nobody") == "--worker names nobody"
    assert args.with_option_names("set allow_rollback, not my-allow_rollback or sampling.allow_rollback") == (
        "set --allow-rollback, not my-allow_rollback or sampling.allow_rollback"
    )
