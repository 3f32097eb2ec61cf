"""`rollbus up`: NATS, workers and the HTTP service on this machine, until a signal. `rollbus init`: its settings."""

import argparse
import asyncio
import json
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

from ....bus.auth.credentials import DEFAULT_PORT
from ....bus.logs import LOG_VARIABLE
from ....schemas.options import add_options, check_start, check_writable, is_hub_id
from ..app import CliParser, common_options, run_async, until_signalled
from ..arguments import COMMANDS
from ..commands.machine import DEFAULT_ADDRESS
from ..console import note, print_json, program, waiting, write
from ..exits import CommandFailed, ExitCode, WrongUsage
from ..options import PACKAGE, config_template, use_model, without_password, worker_flags
from .display import FleetDisplay, LogFile
from .fleet import (
    TINY_MOE,
    LocalFleet,
    check_vllm,
    default_state_dir,
    divide_gpus,
    local_users,
    make_tiny_moe,
    run_fleet,
    worker_names,
)
from .http import address, bind_address, check_installed, check_parsers, serve_http, settings_of
from .processes import RestartRule

LOOPBACK = ("127.0.0.1", "localhost")


def run(args: argparse.Namespace) -> int:
    """Run until a signal arrives."""
    at = None if args.http is None else address(args.http)
    if args.auth_dir is not None and not args.secure:
        raise WrongUsage("--auth-dir requires --secure")
    if args.model is not None:
        is_hub_id(args.model)
    port = nats_port(args.nats, is_named=args.is_nats_named)
    if args.engine == "vllm":
        check_vllm()
    use_model(args)
    check_start(args)
    if args.state_dir is not None or (args.model is None and args.engine == "vllm"):
        check_writable("--state-dir", args.state_dir or default_state_dir())
    worker_env = divide_gpus(args, worker_names(args.workers + args.prefill_workers))
    # Bind the address before any process starts, so that an error is reported immediately.
    with ExitStack() as stack:
        if args.prefill_workers and args.engine == "vllm" and args.kv_transfer_config is None:
            args.kv_transfer_config = through_folder(stack.enter_context(TemporaryDirectory(prefix="rollbus-kv-")))
        check_parsers(args)
        if args.reasoning_parser is not None and args.engine == "vllm":
            # The engine must know where reasoning ends, because a schema applies only to the text after it.
            given = json.loads(args.engine_args or "{}")
            args.engine_args = json.dumps({"reasoning_parser": args.reasoning_parser, **given})
        listening = _http_socket(at)
        if listening is not None:
            stack.enter_context(closing(listening))
        return run_async(_up(args, port, listening, worker_env))


def through_folder(folder: str) -> str:
    """Return the `--kv-transfer-config` of workers that share this folder."""
    extra = {"shared_storage_path": folder}
    return json.dumps({"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra})


def _http_socket(at: tuple[str, int] | None) -> socket.socket | None:
    """Return the socket of the HTTP service, or None if its packages are not installed and --http is not set."""
    try:
        check_installed()
    except CommandFailed as exc:
        if at is not None:
            raise
        note(f"no HTTP service: {exc}")
        return None
    if at is not None:
        return bind_address(*at)
    host, port = address(DEFAULT_ADDRESS)
    try:
        return bind_address(host, port)
    except CommandFailed:
        listening = bind_address(host, 0)
        note(f"port {port} is in use: the HTTP service listens at port {listening.getsockname()[1]}")
        return listening


async def _up(
    args: argparse.Namespace, port: int, listening: socket.socket | None, worker_env: Mapping[str, Mapping[str, str]]
) -> int:

    names = worker_names(args.workers + args.prefill_workers)
    with ExitStack() as stack:
        log, shows_logs = _log_file(args, stack)
        display = FleetDisplay(names, log, shows_logs=shows_logs)
        # A second signal also cancels the orderly stop. Then all processes are killed.
        stack.enter_context(until_signalled(display.stop))
        if log is not None:
            worker_env = {name: {**worker_env.get(name, {}), LOG_VARIABLE: str(log.path)} for name in names}
        fleet = replace(await _prepare(args, port), worker_env=worker_env)
        note(f"starting NATS and {len(names)} worker{'s' * (len(names) > 1)}; Ctrl-C stops everything")
        if log is not None:
            note(f"logs: {log.path}")
        stack.enter_context(display)
        async with run_fleet(fleet, display) as server, AsyncExitStack() as services:
            http = None
            if listening is not None:
                host, _ = address(args.http or DEFAULT_ADDRESS)
                # Users without a model name mean the only model of this command, also if another model joins.
                settings = replace(settings_of(args, host), default_model=args.default_model or fleet.served_model)
                http = await services.enter_async_context(serve_http(server, args.fleet, settings, listening))
            display.end_start()
            _announce(args, fleet, server.url, http)
            await asyncio.Event().wait()
    return ExitCode.OK


def _log_file(args: argparse.Namespace, stack: ExitStack) -> tuple[LogFile | None, bool]:
    """Return the log file, and True if logs go to stderr.

    On a terminal, logs go to a file. A program that reads stderr gets the logs there, and there is no file.
    """
    if args.log_format == "json" or not sys.stderr.isatty():
        return None, True
    try:
        log = LogFile((args.state_dir or default_state_dir()) / "logs")
    except OSError as exc:
        note(f"no log file: {exc}")
        return None, True
    stack.enter_context(log.own_logs(also_stderr=args.verbose))
    return log, args.verbose


async def _prepare(args: argparse.Namespace, port: int) -> LocalFleet:

    users = None
    if args.secure:
        folder = args.auth_dir or (args.state_dir or default_state_dir()) / "auth"
        users = local_users(folder, args.fleet, worker_names(args.workers + args.prefill_workers))
    flags = worker_flags(args)
    model = None if args.model is None else Path(args.model)
    if model is None and args.engine == "vllm":
        state_dir = args.state_dir or default_state_dir()
        note(f"no --model: the workers serve a tiny MoE with random weights, stored in {state_dir}")
        with waiting("creating the model"):
            model = await make_tiny_moe(state_dir)
        if args.served_model_name is None:
            flags += ["--served-model-name", TINY_MOE]
    return LocalFleet(
        fleet=args.fleet,
        model=model,
        num_workers=args.workers + args.prefill_workers,
        num_prefill=args.prefill_workers,
        worker_flags=flags,
        nats_port=port,
        start_timeout_s=args.start_timeout,
        served_model=args.served_model_name or (Path("synthetic") if model is None else model.resolve()).name,
        restarts=RestartRule(),
        users=users,
    )


def _announce(args: argparse.Namespace, fleet: LocalFleet, url: str, http: str | None) -> None:

    if args.json:
        print_json({"nats": url, "http": http, "workers": fleet.worker_ids})
        return
    where = f" --nats {url}" if urlsplit(url).port != DEFAULT_PORT else ""
    write(f"rollbus is up: NATS at {url}, {', '.join(fleet.worker_ids)} serving.")
    if http is not None:
        write(f"HTTP at {http}, for clients of OpenAI, vLLM and Dynamo.")
        write(f"Page: {http}/")
    write("From another terminal:")
    write(f"    {program()} status{where}{_as_user(fleet, 'viewer')}")
    write(f"    {program()} generate --input PROMPTS.jsonl --output RESULTS.jsonl{where}{_as_user(fleet, 'trainer')}")
    if fleet.users is not None:
        write(f"    {program()} pause{where}{_as_user(fleet, 'admin')}")
    write("Ctrl-C stops everything.")


def _as_user(fleet: LocalFleet, role: str) -> str:
    """Return the options with which another command connects as a user of the fleet."""
    if fleet.users is not None:
        return f" --creds {fleet.users.others[role]}"
    return f" --fleet {fleet.fleet}" if fleet.fleet != "default" else ""


def nats_port(url: str, *, is_named: bool) -> int:
    """Return the port for the address of other commands; -1 for any free port.

    Args:
        is_named: True if the user chose the address. False: if the port of the default address is in use, use a free
            port.

    Raises:
        CommandFailed: the address is not on this machine, or its port is in use.
    """
    shown = without_password(url)
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        port = None if "," in parts.netloc else parts.port
    except ValueError as exc:
        raise WrongUsage(f"--nats {shown}: {exc}") from exc
    if parts.hostname not in LOOPBACK or "," in parts.netloc:
        raise WrongUsage(f"--nats {shown}: `up` runs its own NATS server at 127.0.0.1, only for this machine")
    if not port:
        return -1
    if not _is_taken(port):
        return port
    if is_named:
        raise CommandFailed(
            f"--nats {shown}: port {port} is in use; name another port, or nats://127.0.0.1:0 for any free port"
        )
    note(f"port {port} is in use: the NATS server listens at a free port")
    return -1


def _is_taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


UNIT = """\
# Copy this file to /etc/systemd/system, then run: systemctl enable --now {name}
[Unit]
Description=rollbus fleet of {config}
After=network-online.target

[Service]
WorkingDirectory={directory}
EnvironmentFile=-{env}
ExecStart={program} up --config {config}
Restart=on-failure
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStopSec=45

[Install]
WantedBy=multi-user.target
"""
ENV = """\
# Environment of rollbus. The tokens are secrets.
ROLLBUS_HTTP_TOKEN={http}
ROLLBUS_ADMIN_TOKEN={admin}
# ROLLBUS_NATS=nats://127.0.0.1:4222
# ROLLBUS_CREDS=/etc/rollbus/trainer.json
"""


UNITS: Final = PACKAGE / "frontend/cli/units"
"""Units of systemd, the same files as in deploy/systemd."""
UNITS_PROGRAMS: Final = "/opt/rollbus/bin/"
"""Directory of the programs in these units. `rollbus init` replaces it with that of this Python."""


def units(directory: Path) -> dict[Path, str]:
    """Return the units for this installation, by the paths where they shall be."""
    programs = f"{Path(sys.executable).parent}/"
    if re.search(r"[\s%$\"'\\\\]", programs):
        raise CommandFailed(f"the path {programs} has characters that units of systemd treat specially")
    texts = {directory / path.name: path.read_text() for path in sorted(UNITS.iterdir())}
    return {path: text.replace(UNITS_PROGRAMS, programs) for path, text in texts.items()}


def run_init(args: argparse.Namespace) -> int:
    """Write the files."""
    if args.units is not None:
        if args.systemd is not None or args.env is not None:
            raise WrongUsage("--units writes nothing else; omit --systemd and --env")
        write_new(units(args.units))
        write("Write the files that each unit reads, then: systemctl daemon-reload")
        return ExitCode.OK
    options = CliParser(add_help=False)
    add_options(options, COMMANDS["up"].options)
    config, env = args.file.absolute(), (args.env or args.file.with_suffix(".env")).absolute()
    files = {args.file: config_template((common_options(), options), args.file.name)}
    if args.systemd is not None:
        program = Path(sys.executable).with_name("rollbus")
        files[args.systemd] = UNIT.format(
            name=args.systemd.stem,
            config=shlex.quote(str(config)),
            directory=config.parent,
            env=env,
            program=shlex.quote(str(program)),
        )
    if args.env is not None:
        files[args.env] = ENV.format(http=secrets.token_urlsafe(32), admin=secrets.token_urlsafe(32))
    write_new(files, secret=args.env)
    write(f"Edit {args.file}, then: rollbus up --config {args.file}")
    return ExitCode.OK


def write_new(files: Mapping[Path, str], secret: Path | None = None) -> None:
    """Write files, or none of them if one exists; only this user may read the secret one."""
    for path in files:
        if path.exists():
            raise WrongUsage(f"{path} exists; name another file")
        check_writable("the directory", path.absolute().parent)
    for path, text in files.items():
        path.touch(0o600 if path == secret else 0o666, exist_ok=False)
        path.write_text(text)
        write(f"wrote {path}")
