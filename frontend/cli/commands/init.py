"""Write a commented file of settings for `rollbus up --config`.

The file has every option of `rollbus up`, with its help and its default. --systemd also writes a unit that runs the
fleet, and --env a file of environment variables with new tokens for the HTTP service. The unit reads that file, and so
does `docker compose`. Existing files are not overwritten.
"""

import argparse
import secrets
import shlex
import sys
from pathlib import Path

from ....schemas.options import check_writable
from ..exits import CommandFailed, ExitCode
from ..options import config_template

HELP = "write a file of settings for `rollbus up`"
EXAMPLES = (
    "rollbus init",
    "rollbus init fleet.toml --systemd fleet.service --env fleet.env",
)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        nargs="?",
        default=Path("fleet.toml"),
        help="file to write (default: fleet.toml)",
    )
    parser.add_argument("--systemd", metavar="FILE", type=Path, help="also write a unit of systemd (default: none)")
    parser.add_argument("--env", metavar="FILE", type=Path, help="also write a file of variables (default: none)")


def run(args: argparse.Namespace) -> int:
    """Write the files."""
    from ..app import CliParser, common_options
    from ..console import write
    from . import up

    options = CliParser(add_help=False)
    up.add_arguments(options)
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
    for path in files:
        if path.exists():
            raise CommandFailed(f"{path} exists; name another file", ExitCode.USAGE)
        check_writable("the directory", path.absolute().parent)
    for path, text in files.items():
        # The file of variables has secrets.
        path.touch(0o600 if path == args.env else 0o666, exist_ok=False)
        path.write_text(text)
        write(f"wrote {path}")
    write(f"Edit {args.file}, then: rollbus up --config {args.file}")
    return ExitCode.OK
