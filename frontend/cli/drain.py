"""`rollbus drain`: as a command to workers over NATS, or over the local socket of one worker."""

import argparse
import http.client
import json
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Final

from ...schemas.options import MAX_DRAIN_S
from .console import note, print_json
from .control import drain
from .exits import CommandFailed, ExitCode, WrongUsage
from .options import refuse_options
from .tables import printable

MARGIN_S: Final = 10.0
"""Seconds for a busy worker to answer after the limit of its drain."""
MAX_ANSWER_BYTES: Final = 65_536
OTHERS: Final = ("all", "one_by_one", "allow_none", "start_timeout", "model", "expect")
"""Options of a command to workers that a socket does not have."""


def run(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
    """Drain the named workers, or the worker behind a socket."""
    if args.socket is None:
        return drain(args)
    if args.workers:
        raise WrongUsage("drain takes either the ids of workers or --socket")
    refuse_options(args, OTHERS, "with --socket")
    return _drain_at(args.socket, args.timeout_s, as_json=args.json)


def _drain_at(path: Path, timeout_s: float | None, *, as_json: bool) -> int:
    if timeout_s is not None and timeout_s > MAX_DRAIN_S:
        raise WrongUsage(f"--timeout-s is {timeout_s:g}; allowed: at most {MAX_DRAIN_S:g} seconds")
    connection = _UnixConnection(path, (MAX_DRAIN_S if timeout_s is None else timeout_s) + MARGIN_S)
    try:
        connection.request("POST", "/drain" if timeout_s is None else f"/drain?timeout_s={timeout_s:.3f}")
        answer = connection.getresponse()
        found = json.loads(answer.read(MAX_ANSWER_BYTES))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except TimeoutError as exc:
        raise CommandFailed(f"the worker at {path} does not answer", ExitCode.TIMEOUT) from exc
    except OSError as exc:
        reason = exc.strerror or "it closed the connection without an answer: it ended, or another process listens"
        raise CommandFailed(f"no drain by a worker at {path}: {reason}") from exc
    except (http.client.HTTPException, ValueError, RecursionError) as exc:
        raise CommandFailed(f"the process at {path} is not a worker: its answer is invalid") from exc
    finally:
        connection.close()
    if as_json:
        print_json({"status": answer.status, **found})
    said = {name: printable(str(value)) for name, value in found.items()}
    if answer.status == http.HTTPStatus.OK:
        note(f"drained; its state is {said.get('state')}")
        return ExitCode.OK
    if answer.status == http.HTTPStatus.GATEWAY_TIMEOUT:
        left = f"{said.get('in_flight')} requests in flight; its clients have not acknowledged everything"
        raise CommandFailed(f"the worker at {path} is not drained in time: {left}", ExitCode.TIMEOUT)
    raise CommandFailed(f"the worker at {path} did not drain: {said.get('error', answer.status)}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of to a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
