"""`python -m rollbus.workers.ray up|down`: the process of `rollbus ray`."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import FrameType

from ...schemas.errors import InvalidRequest, RollbusError
from ...schemas.options import ENGINE_OPTIONS, RAY_OPTIONS, add_options, flags_of
from .fleet import CHECK_S, Fleet, connect, end, find


def parser() -> argparse.ArgumentParser:
    """Return the parser of the process."""
    parser = argparse.ArgumentParser(prog="rollbus ray")
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--nats", metavar="URL")
    parser.add_argument("--fleet", metavar="NAME", default="default")
    parser.add_argument("--json", action="store_true")
    add_options(parser, (*RAY_OPTIONS, *ENGINE_OPTIONS))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Start a fleet and wait for its end, or end one. Return the exit code."""
    args = parser().parse_args(argv)
    # Ray's own handler of SIGTERM would end this process without the workers' drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        if args.action == "down":
            return _down(args)
        return _up(args)
    except InvalidRequest as exc:
        sys.stderr.write(f"rollbus ray: {exc.message}\n")
        return 2
    except RollbusError as exc:
        sys.stderr.write(f"rollbus ray: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _up(args: argparse.Namespace) -> int:
    engine_flags = argparse.Namespace(**{**vars(args), "engine": "vllm", "engine_args": None, "otel": False})
    if args.otel:
        raise InvalidRequest(field="--otel", problem="is set", allowed="no --otel: workers on Ray export no spans yet")
    names = {field.name for field in fields(Fleet)}
    given = {name: value for name, value in vars(args).items() if name in names}
    for name in ("engine_args", "runtime_env"):
        given[name] = json.loads(given[name] or "{}")
    fleet = Fleet(**given, worker_flags=flags_of(engine_flags, ENGINE_OPTIONS))
    with fleet:
        signal.signal(signal.SIGTERM, _interrupt)
        sys.stderr.write(f"{fleet.servers}\n")
        fleet.wait_serving(args.start_timeout)
        if args.json:
            lines = json.dumps({"nats": fleet.url, "workers": [worker["worker"] for worker in fleet.status()]})
        else:
            until = "`rollbus ray down`" if args.detach else "Ctrl-C or `rollbus ray down`"
            lines = f"rollbus is up: {args.workers} workers serve, NATS at {fleet.url}\n{until} stops everything."
        sys.stdout.write(f"{lines}\n")
        sys.stdout.flush()
        if not args.detach:
            fleet.wait()
    return 0


def _down(args: argparse.Namespace) -> int:
    connect(args.address)
    supervisor = find(args.fleet)
    if supervisor is None:
        raise RollbusError(f"fleet {args.fleet} does not run on this Ray cluster")
    end(supervisor, CHECK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
