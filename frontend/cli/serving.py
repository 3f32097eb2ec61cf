"""Which workers serve, for commands that have nothing to do without one."""

from collections.abc import Sequence

from ...bus.protocol.fleet.presence_table import accepts_whole_requests
from ...schemas.presence import WorkerPresence, WorkerState
from .arguments import without_password
from .exits import CommandFailed, ExitCode

__all__ = ["serving_workers"]


def serving_workers(workers: Sequence[WorkerPresence], *, nats_url: str, fleet: str) -> list[WorkerPresence]:
    """Those of `workers` that take requests now.

    Raises:
        CommandFailed: none does; the message says what they are doing.
    """
    serving = [worker for worker in workers if worker.state is WorkerState.SERVING and accepts_whole_requests(worker)]
    if not serving:
        others = ", ".join(
            f"{worker.worker} is {worker.state if accepts_whole_requests(worker) else 'there for prefill alone'}"
            for worker in workers
        )
        raise CommandFailed(
            f"no worker serves in fleet {fleet!r} at {without_password(nats_url)} ({others or 'none is there'}); "
            "start one with `rollbus up` or `rollbus worker`",
            ExitCode.NO_WORKERS,
        )
    return serving
