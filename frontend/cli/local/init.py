"""`rollbus init`: a commented file of settings for `rollbus up`, a unit of systemd and a file of variables."""

import argparse
import secrets
import shlex
import sys
from pathlib import Path

from ....schemas.options import check_writable
from ..app import CliParser, common_options
from ..arguments import COMMANDS, add_options
from ..console import write
from ..exits import CommandFailed, ExitCode
from ..options import config_template

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


def run(args: argparse.Namespace) -> int:
    """Write the files."""
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
