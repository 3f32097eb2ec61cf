"""The worker process: `python -m rollbus.workers`, or `rollbus worker`.

The worker waits until a NATS server accepts its connection. Exit codes: 0 if it was stopped on request, 1 if it failed
(the engine died or NATS refused the user), 2 for wrong usage, 78 if another worker has the same id. With
`--on-duplicate wait` it waits for the id instead. The first signal drains the worker, the second one stops it at once.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import uvloop
from msgspec.structs import replace

from ..bus.auth.credentials import worker_identity
from ..bus.logs import LogFormat, is_json, set_up
from ..bus.nats.server import Server, default_url
from ..bus.tracing.spans import Tracing, check_tracing, make_tracer
from ..schemas.errors import EXIT_DUPLICATE_WORKER, DuplicateWorker, InvalidRequest, RollbusError, ServerUnreachable
from ..schemas.options import ENGINE_OPTIONS, PROCESS_OPTIONS, add_options, check_start
from ..schemas.presence import WorkerPresence
from .config import WorkerConfig, default_cache_dir, default_worker_id
from .engines import make_engine, preload
from .engines.engine import Engine
from .lifecycle import wait_until_free
from .local_socket import listen_locally
from .probe import ProbeServer, listen
from .request_spans import RequestSpans
from .worker import Worker

logger = logging.getLogger("rollbus.workers")

KV_ARG = "kv_transfer_config"
"""Name of the engine argument that `--kv-transfer-config` sets."""
AS_GIVEN = (
    *("incarnation", "weight_version", "lease_s", "engine_timeout_s", "transfer_idle_s", "stage_bytes"),
    *("fetch_rate", "drain_s"),
)
"""Options that are fields of `WorkerConfig`."""
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
        raise InvalidRequest(KV_ARG, "is given twice", "--kv-transfer-config or --engine-args")
    return {**given, KV_ARG: json.loads(args.kv_transfer_config)}


def _resolve_model(model: str | None) -> str:
    """Return the folder without symlinks: a link may lead elsewhere before the engine reads it. Names stay names."""
    return str(Path(model).resolve()) if model and Path(model).exists() else model or ""


def configure(args: argparse.Namespace) -> tuple[WorkerConfig, Callable[[], Engine]]:
    """Return the configuration of a worker with these options of `parser`, and what makes its engine.

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
        model_path=None if args.model is None else str(Path(args.model).resolve()),
        # A generated id is unique, so there is no other worker to listen for.
        listen_s=args.listen_s if worker_id is not None else 0.0,
        start_timeout_s=args.start_timeout,
        weight_roots=tuple(str(Path(root).absolute()) for root in args.weight_root),
        cache_dir=args.cache_dir or default_cache_dir(),
        prove_reload=not args.no_prove_reload,
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    return config, partial(make_engine, args.engine, _resolve_model(args.model), _parse_engine_args(args), args.role)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it stops. Return the exit code."""
    args = parser().parse_args(argv)
    set_up(args.log_level.upper(), args.log_format)
    if args.model is None and args.engine != "synthetic":
        return _report_failure(RollbusError(f"--model is required for the engine {args.engine}"), 2)
    try:
        config, make = configure(args)
        # The first engine is made now, so that its errors are reported before anything starts.
        engines = itertools.chain([make()], iter(make, None))
        tracing = check_tracing(bool(args.otel), "--otel")

        def make_worker(config: WorkerConfig, spans: RequestSpans | None) -> Worker:
            return Worker(config, next(engines), None if spans is None else spans.export)

        with contextlib.ExitStack() as until_ended:
            listening = [] if args.probe is None else [(listen(args.probe), False)]
            if args.socket is not None:
                listening.append((until_ended.enter_context(listen_locally(args.socket)), True))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, partial(_end_early, config.worker_id))
            preload(args.engine, _resolve_model(args.model))
            uvloop.run(_run(config, make_worker, tracing, args, listening))
    except InvalidRequest as exc:
        return _report_failure(RollbusError(exc.message), 2)
    except DuplicateWorker as exc:
        return _report_failure(exc, EXIT_DUPLICATE_WORKER)
    except RollbusError as exc:
        return _report_failure(exc)
    return 0


def _end_early(worker_id: str, *_signal: object) -> NoReturn:
    """End the process while it imports the engine's modules. An exception could be caught by one of them."""
    logger.info("worker.start_cancelled worker=%s", worker_id)
    os._exit(0)


def _report_failure(error: RollbusError, exit_code: int = 1) -> int:
    if is_json():
        logger.error("worker.failed error=%s", error)
    else:
        sys.stderr.write(f"rollbus worker: {error}\n")
    return exit_code


class WorkerProcess:
    """The worker of this process, also before it is connected and between two tries, and what ends it.

    Args:
        make: returns a new worker with a configuration.
    """

    def __init__(self, config: WorkerConfig, make: Callable[[WorkerConfig], Worker]) -> None:
        self._config = config
        self._make_worker = make
        self._worker: Worker | None = None
        self._waiting = asyncio.current_task()
        self._drain_reason: str | None = None
        self._is_stopping = False

    def make(self, config: WorkerConfig) -> Worker:
        """Make the next worker. It drains itself if the last one was told to."""
        self._worker = self._make_worker(config)
        if self._drain_reason is not None:
            self._worker.drain(self._drain_reason)
        return self._worker

    def forget(self) -> None:
        """Forget a worker that ended, while this process waits for its id."""
        self._worker = None

    def stop(self) -> None:
        """Drain the worker and stop it. The second call stops it without waiting for clients."""
        worker, is_first, self._is_stopping = self._worker, not self._is_stopping, True
        if worker is not None and worker.is_assembled:
            if is_first:
                worker.stop()
            else:
                worker.stop_now()
        elif is_first and self._waiting is not None:
            # A second cancellation would cut the cleanup after the first one.
            self._waiting.cancel()

    def describe(self) -> WorkerPresence | None:
        """Return the presence of the worker, or None while it is not connected."""
        return self._worker.presence() if self._worker is not None and self._worker.is_assembled else None

    async def drain(self, limit_s: float | None) -> bool:
        """Drain the worker for good, as `ProbeServer` needs it. This process goes on until it is stopped."""
        self._drain_reason = "the worker was drained over its own socket"
        if self._worker is None:
            return True
        self._worker.drain(self._drain_reason)
        return await self._worker.wait_drained(self._config.drain_s if limit_s is None else limit_s)


async def _run(
    config: WorkerConfig,
    make: Callable[[WorkerConfig, RequestSpans | None], Worker],
    tracing: Tracing,
    args: argparse.Namespace,
    listening: Sequence[tuple[socket.socket, bool]],
) -> None:
    """Run this process's worker until it ends.

    Args:
        listening: sockets of the probe, and whether each of them may drain the worker.
    """
    loop, spans = asyncio.get_running_loop(), None
    async with contextlib.AsyncExitStack() as until_ended:
        process = WorkerProcess(config, lambda config: make(config, spans))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        if args.parent_pipe is not None:
            watch_parent(args.parent_pipe, lambda: loop.call_soon_threadsafe(process.stop))
        for listener, may_drain in listening:
            # The probe also answers while the worker waits for a NATS server.
            probe = ProbeServer(listener, process.describe, process.drain if may_drain else None)
            await until_ended.enter_async_context(probe)
            logger.info("probe.started address=%s", listener.getsockname())
        tracer = make_tracer(tracing, service_name="rollbus-worker", field="--otel")
        if tracer is not None:
            until_ended.push_async_callback(asyncio.to_thread, tracer.close)
            spans = RequestSpans(tracer, worker=config.worker_id, model=config.model)
        try:
            await serve(config, process.make, process.forget if args.on_duplicate == "wait" else None)
        except asyncio.CancelledError:
            # Only `stop` cancels this task.
            logger.info("worker.start_cancelled worker=%s", config.worker_id)


async def serve(
    config: WorkerConfig,
    make: Callable[[WorkerConfig], Worker],
    on_duplicate: Callable[[], None] | None = None,
) -> None:
    """Run a worker. Wait without a time limit until it has connected to a NATS server.

    Args:
        make: returns a new worker with a new engine.
        on_duplicate: called when another worker has the id, before a wait without a time limit until the id is free.
            None: do not wait.

    Raises:
        RollbusError: as `Worker.run`, but a server that does not answer yet is no error.
    """
    next_line_at, is_free = 0.0, True
    while True:
        worker = None
        try:
            if not is_free:
                await wait_until_free(config)
            worker, is_free = make(config), True
            await worker.run()
        except ServerUnreachable as exc:
            if worker is not None and worker.is_assembled:
                raise
            # The attempt itself waited before it failed, so no sleep is needed.
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + REPEAT_S
                logger.warning("worker.server_awaited error=%s", exc)
        except DuplicateWorker as exc:
            if on_duplicate is None or worker is None or worker.is_stopping:
                raise
            logger.warning("worker.id_awaited worker=%s error=%s", config.worker_id, exc)
            on_duplicate()
            # Only the first incarnation of a process was announced.
            is_free, config = False, replace(config, incarnation=None)
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
