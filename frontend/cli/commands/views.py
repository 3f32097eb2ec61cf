"""Subcommands that only show: the fleet, its requests, experts and weights, records of runs, and problems."""

import argparse
from typing import Final, Literal, get_args

from ....schemas.limits import MAX_TIMELINES
from ....schemas.options import arg, duration, flag
from ....schemas.telemetry import RequestKind
from ..arguments import command, one_of, workers_option

Sort = Literal["state", "worker", "in-flight", "kv", "tokens", "first-token", "next-token", "hits"]
"""Sort key of the workers in `rollbus top`. Names ascend, numbers descend, and the worst states come first."""
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
"""Sort keys in the order in which the key `s` selects them."""
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 60.0


def _interval(text: str) -> float:
    seconds = duration(text)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
    return seconds


@command(
    "show the workers of the fleet and their queues",
    "watch.status:run",
    flag("--watch", "refresh each second until Ctrl-C; with --json one line per second"),
)
def status() -> None:
    """Show the live workers of the fleet: their state, desired state and capabilities, and the queues.

    If no worker is live, the command exits with 5. With --watch, it continues even without workers, and Ctrl-C ends it
    with exit code 0.

    Examples:
        rollbus status
        rollbus status --watch
        rollbus status --json
    """


@command(
    "watch the fleet in the terminal, with its rates",
    "watch.terminal:run",
    arg("--interval", "TIME", "seconds between refreshes (default: 1)", type=_interval, default=1.0),
    arg("--sort", SORTS, "initial order of the workers (default: state, the worst first)", default="state"),
    arg("--model", "NAME", "show the workers of one model (default: all)"),
    flag("--once", "print the tables once (implied by --json)"),
)
def top() -> None:
    """Show the fleet in the terminal and update it: workers with their rates, queues, desired state and commands.

    The command reads the presence that workers publish every second. It needs no HTTP service and sends no requests to
    workers. Keys: q quits, s changes the order, p selects the next model, arrows and page keys scroll. If stdout is not
    a terminal, the command prints the tables once. If it prints once and no worker is live, it exits with 5. Every role
    may use the command. It omits data that the user may not read.

    Examples:
        rollbus top
        rollbus top --sort tokens --interval 5
        rollbus top --once
        rollbus top --json
    """


@command(
    "list requests: running, slowest, failed or resumed",
    "watch.traces:run_list",
    arg("show", get_args(RequestKind), "the list (default: running)", nargs="?", default="running"),
    arg("--client", "NAME", "only requests of this client (default: of all)"),
    arg("--model", "NAME", "only requests for this model (default: for all)"),
    workers_option("only requests at this worker; may be repeated (default: at all workers)"),
    arg(
        "--limit",
        "N",
        f"maximum number of requests, up to {MAX_TIMELINES} (default: 50)",
        type=int,
        choices=range(1, MAX_TIMELINES + 1),
        default=50,
    ),
    flag("--once", "print the list once, also in a terminal (implied by --json)"),
)
def requests() -> None:
    """List the requests at the workers: running, slowest, failed or resumed. In a terminal, Enter opens a request's
    trace.

    Each worker knows its requests in flight and the last 1,000 that ended. Requests that wait in the queue are not
    listed: `rollbus status` counts them. In a terminal, the list is updated each second. Keys: arrows select, Enter
    opens the trace, b goes back, s shows the next list, q quits. If some workers do not answer, the command exits with
    3.

    Examples:
        rollbus requests
        rollbus requests slowest --client trainer-0
        rollbus requests failed --worker local-0 --json
    """  # noqa: D205 - two sentences


@command(
    "show the history of a request",
    "watch.traces:run",
    arg("request_id", "REQUEST", "id of the request"),
    arg("--model", "NAME", "name of the model whose workers to ask (default: every model)"),
    arg("--timeout-s", "TIME", "seconds to wait for the answers of all workers (default: 5)", default=5.0),
)
def trace() -> None:
    """Show the history of one request of any client: its attempts, its workers, and its time in each phase.

    REQUEST is the id from the client, or the id of an OpenAI answer. The command asks the workers. Each worker stores
    the history of its requests in flight and of its last 1,000 ended requests. If no worker knows the request, the
    command exits with 1. If some workers do not answer, it exits with 3.

    Examples:
        rollbus trace req-1
        rollbus trace chatcmpl-6f1c --json
    """


@command(
    "show why requests do not end, and the next command to run",
    "watch.why:run",
    arg("--model", "NAME", "only requests for this model (default: for all)"),
)
def why() -> None:
    """Show what keeps a step from ending: stops and their authors, locks, late workers, and requests without a token.

    Each cause has the next command to run. The command reads the state of the fleet and asks the workers for their
    requests in flight. Users that may not read requests see the other causes.

    Examples:
        rollbus why
        rollbus why --model my-model
        rollbus why --json
    """


@command(
    "show how often the router chose each expert",
    "watch.experts:run",
    arg("--model", "NAME", "name of the model (default: the only model of the fleet)"),
    workers_option("id of a worker; may be repeated (default: all workers, or a sample of 64)"),
    arg("--plane", ("both", "prompt", "generated"), "positions to show (default: both)", default="both"),
    one_of(
        arg("--last-s", "TIME", "show the counts of the last S seconds, up to 120 (default: 60)", default=60.0),
        flag("--versions", "show all counts of each of the last 8 weight versions"),
    ),
    arg("--png", "FILE", "also write the map as a PNG picture (default: none)"),
    arg("--timeout-s", "TIME", "seconds to wait for answers (default: 5)", default=5.0),
)
def experts() -> None:
    """Show how often the router chose each expert: a map of layers by experts, and the imbalance of each layer.

    Workers count the positions that their engines compute, in intervals of 5 s: generated tokens, and prompt tokens
    that are not cached. The command asks up to 64 workers of the model. If some workers do not answer, it names them
    and exits with 3.

    Examples:
        rollbus experts
        rollbus experts --plane generated --last-s 10
        rollbus experts --versions
        rollbus experts --png experts.png
    """


@command(
    "show the published weights",
    "weights:run",
    arg("--model", "NAME", "name of the model (default: every model of the fleet)"),
)
def weights() -> None:
    """Show the published weights of a model: the stored versions, their sizes, and the workers that have them.

    A version is an anchor (a whole checkpoint), or a delta with the changes since the version in the line above.
    Workers load the recorded version when they start.

    Examples:
        rollbus weights
        rollbus weights --model policy --json
    """


@command(
    "show the record of a run, and draw its picture",
    "records:run",
    arg("directory", "DIR", "directory of the record"),
    arg("--svg", "FILE", "file for the picture (default: none)"),
    reads_no_credentials=True,
)
def record() -> None:
    """Show what the record of a run has, and draw its picture. This needs no worker and no NATS.

    Programs record with `rb.record(DIR)`, and `rollbus generate` with --record DIR. The picture has the lengths, the
    staleness, the rewards and the throughput over time, and the updates of the weights. A record of a run that was
    killed, or that still runs, is readable too: the command prints what is missing.

    Examples:
        rollbus record run/
        rollbus record run/ --svg run.svg
    """


@command("find problems of machine, server and fleet", "doctor.server:run", reads_no_credentials=True)
def doctor() -> None:
    """Check this machine, the NATS server and the fleet, and print each problem with its remedy.

    The command changes nothing. If a check fails (`fail`), it exits with 1. Otherwise it exits with 0, even with
    warnings.

    Examples:
        rollbus doctor
        rollbus doctor --nats nats://127.0.0.1:4222 --json
    """
