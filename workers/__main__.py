"""The worker process: `python -m rollbus.workers`, or `rollbus worker`.

The worker waits until a NATS server accepts its connection. Exit codes: 0 if it was stopped on request, 1 if it failed
(the engine died or NATS refused the user), 2 for wrong usage, 78 if another worker has the same id.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import uvloop

from ..bus.auth.credentials import worker_identity
from ..bus.logs import LogFormat, is_json, set_up
from ..bus.nats.server import Server, default_url
from ..bus.tracing.spans import Tracing, check_tracing, make_tracer
from ..schemas.errors import EXIT_DUPLICATE_WORKER, DuplicateWorker, InvalidRequest, RollbusError, ServerUnreachable
from ..schemas.options import ENGINE_OPTIONS, PROCESS_OPTIONS, add_options, check_start
from .config import WorkerConfig, default_cache_dir, default_worker_id
from .engines import make_engine
from .engines.engine import Engine
from .probe import ProbeServer, listen
from .request_spans import RequestSpans
from .worker import Worker

logger = logging.getLogger("rollbus.workers")

KV_ARG = "kv_transfer_config"
"""Name of the engine argument that `--kv-transfer-config` sets."""
REPEAT_S = 30.0
"""Seconds between two log lines about the wait for a server. The end of a log then shows one, and a day has a few
thousand."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of a worker's command line."""
    parser = argparse.ArgumentParser(prog="rollbus worker", description="One worker: one engine on the bus.")
    parser.add_argument(
        "--nats",
        metavar="URL",
        default=default_url(),
        help="URL of the NATS server, or of several of one cluster: a,b,c (default: $ROLLBUS_NATS)",
    )
    parser.add_argument(
        "--creds", metavar="FILE", help="credentials of the NATS user (default: $ROLLBUS_CREDS, or none)"
    )
    parser.add_argument("--fleet", metavar="NAME", help="fleet to serve (default: the fleet of --creds)")
    parser.add_argument("--model", metavar="DIR", help="folder of the checkpoint (required for the engine vllm)")
    add_options(parser, (*ENGINE_OPTIONS, *PROCESS_OPTIONS))
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument(
        "--log-format",
        choices=get_args(LogFormat),
        default="text",
        help="json: one object per line (default: %(default)s)",
    )
    parser.add_argument(
        "--incarnation",
        metavar="ID",
        help="first incarnation of the worker, which the program that starts it announces (default: a random id)",
    )
    parser.add_argument(
        "--parent-pipe",
        metavar="FD",
        type=int,
        help="file descriptor of a pipe; the worker stops when the other end is closed (default: none)",
    )
    return parser


def _parse_engine_args(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(args.engine_args or "{}")
    if args.kv_transfer_config is None:
        return given
    if KV_ARG in given:
        raise InvalidRequest(field=KV_ARG, problem="is given twice", allowed="--kv-transfer-config or --engine-args")
    return {**given, KV_ARG: json.loads(args.kv_transfer_config)}


def _resolve_model(model: str | None) -> str:
    """Return the folder without symlinks: a link may lead elsewhere before the engine reads it. Names stay names."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model or ""


def configure(args: argparse.Namespace) -> tuple[WorkerConfig, Engine]:
    """Return the configuration and the engine, which is not started, of a worker with these options of `parser`.

    Raises:
        RollbusError: an option or a file that it names is wrong.
    """
    check_start(args)
    server = Server.named(args.nats, args.creds)
    fleet, worker_id = worker_identity(server.credentials, fleet=args.fleet, worker=args.worker_id)
    config = WorkerConfig(
        nats_url=server.url,
        credentials=server.credentials,
        tls=server.tls,
        replicas=server.replicas,
        fleet=fleet,
        worker_id=worker_id or default_worker_id(),
        model=args.served_model_name or Path(args.model or "synthetic").resolve().name,
        incarnation=args.incarnation,
        weight_version=args.weight_version,
        model_path=None if args.model is None else str(Path(args.model).resolve()),
        lease_s=args.lease_s,
        # A generated id is unique, so there is no other worker to listen for.
        listen_s=args.listen_s if worker_id is not None else 0.0,
        engine_timeout_s=args.engine_timeout_s,
        transfer_idle_s=args.transfer_idle_s,
        start_timeout_s=args.start_timeout,
        weight_roots=tuple(str(Path(root).absolute()) for root in args.weight_root),
        cache_dir=args.cache_dir or default_cache_dir(),
        stage_bytes=args.stage_bytes,
        fetch_rate=args.fetch_rate,
        prove_reload=not args.no_prove_reload,
    )
    return config, make_engine(args.engine, _resolve_model(args.model), _parse_engine_args(args), args.role)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it stops. Return the exit code."""
    args = parser().parse_args(argv)
    set_up(args.log_level.upper(), args.log_format)
    if args.model is None and args.engine != "synthetic":
        return _report_failure(RollbusError(f"--model is required for the engine {args.engine}"), 2)
    try:
        config, engine = configure(args)
        tracing = check_tracing(bool(args.otel), "--otel")
        probed = None if args.probe is None else listen(args.probe)
    except InvalidRequest as exc:
        return _report_failure(RollbusError(exc.message), 2)
    except RollbusError as exc:
        return _report_failure(exc)
    try:
        uvloop.run(_run(config, engine, tracing, args.parent_pipe, probed))
    except DuplicateWorker as exc:
        return _report_failure(exc, EXIT_DUPLICATE_WORKER)
    except RollbusError as exc:
        return _report_failure(exc)
    return 0


def _report_failure(error: RollbusError, exit_code: int = 1) -> int:
    if is_json():
        logger.error("worker.failed error=%s", error)
    else:
        sys.stderr.write(f"rollbus worker: {error}\n")
    return exit_code


async def _run(
    config: WorkerConfig, engine: Engine, tracing: Tracing, parent_pipe: int | None, probed: socket.socket | None
) -> None:
    loop, waiting = asyncio.get_running_loop(), asyncio.current_task()
    if waiting is None:
        raise RuntimeError("not called in a task")
    worker: Worker | None = None

    def stop() -> None:
        if worker is None or not worker.is_assembled:
            waiting.cancel()
        else:
            worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if parent_pipe is not None:
        watch_parent(parent_pipe, lambda: loop.call_soon_threadsafe(stop))
    async with contextlib.AsyncExitStack() as until_ended:
        if probed is not None:
            # The probe also answers while the worker waits for a NATS server.
            probe = ProbeServer(
                probed, lambda: worker.presence() if worker is not None and worker.is_assembled else None
            )
            await until_ended.enter_async_context(probe)
            logger.info("probe.started port=%s", probe.port)
        tracer = make_tracer(tracing, service_name="rollbus-worker", field="--otel")
        export = None
        if tracer is not None:
            until_ended.push_async_callback(asyncio.to_thread, tracer.close)
            export = RequestSpans(tracer, worker=config.worker_id, model=config.model).export

        def make() -> Worker:
            nonlocal worker
            worker = Worker(config, engine, export)
            return worker

        try:
            await serve(config, make)
        except asyncio.CancelledError:
            # Only `stop` cancels this task.
            logger.info("worker.start_cancelled worker=%s", config.worker_id)


async def serve(config: WorkerConfig, make: Callable[[], Worker]) -> None:
    """Run a worker. Wait without a time limit until it has connected to a NATS server.

    Args:
        make: returns a new worker.

    Raises:
        RollbusError: as `Worker.run`, but a server that does not answer yet is no error.
    """
    next_line_at = 0.0
    while True:
        worker = make()
        try:
            await worker.run()
        except ServerUnreachable as exc:
            if worker.is_assembled:
                raise
            # The attempt itself waited before it failed, so no sleep is needed.
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + REPEAT_S
                logger.warning("worker.server_awaited error=%s", exc)
        else:
            return


def watch_parent(fd: int, on_end: Callable[[], object]) -> None:
    """Call `on_end` from a thread when the other end of the pipe `fd` closes, for example because the parent died."""

    def wait() -> None:
        while os.read(fd, 4096):
            pass
        on_end()

    # Use a thread, because a busy event loop or a loading engine must not delay the call.
    threading.Thread(target=wait, name="watch-parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
