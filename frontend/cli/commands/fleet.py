"""Subcommands that change a fleet: commands to its workers, weights, queues and stored states."""

from pathlib import Path
from typing import Final, get_args

from ....schemas.control import PauseMode
from ....schemas.options import Option, arg, flag, non_negative_int
from ..arguments import command, group, one_of, workers_option

SENT: Final = "control:send"
"""Sends the command of the subcommand's method of `Fleet`."""

SWITCH: Final = (
    arg("--mode", get_args(PauseMode), "requests in flight during the switch (default: keep)", default="keep"),
    flag("--allow-rollback", "allow N to be lower than the current version"),
    arg("--min-staged", "N", "workers that must have the weights before the switch; others serve later (default: all)"),
)
"""Options that state how workers switch to new weights."""


def send_options(*, has_worker: bool = True) -> Option:
    """Return the options that select the workers of a command and its timeout.

    Args:
        has_worker: with --worker; False if the workers are positional arguments.
    """
    text = "only this worker; may be repeated (default: all workers, including those that start later)"
    return group(
        "workers of the command",
        arg("--model", "NAME", "only workers that serve this model (default: all models)"),
        *([workers_option(text)] if has_worker else []),
        arg("--expect", "N", "live workers of the model or fleet without which nothing is sent (default: no check)"),
        arg("--timeout-s", "TIME", "seconds for each worker (default: 60, or 600 for weights and adapters)"),
    )


def source_options(what: str) -> tuple[Option, Option]:
    """Return PATH and the options that state where PATH is.

    Args:
        what: content of the folder, for the help.
    """
    return (
        arg("path", "PATH", f"folder of the {what} on the workers' machines, below one of their --weight-root"),
        one_of(
            flag("--upload", "PATH is on this machine: upload it through NATS for the workers"),
            flag("--objects", "PATH is BUCKET/PREFIX of an upload in the NATS object store"),
        ),
    )


@command(
    "abort requests in flight",
    SENT,
    arg("request_ids", "ID", "id of a request, as set by its client", nargs="+"),
    send_options(),
)
def abort() -> None:
    """Abort requests in flight of any client. Their response streams end with the finish reason `abort`.

    Requests that still wait in the queue are not aborted. The command reports each id that no worker has. A request may
    have ended by itself, so the command fails only if no worker has any of the ids.

    Examples:
        rollbus abort req-1
        rollbus abort req-1 req-2 --worker w0
    """


@command(
    "end an open transfer of weights",
    SENT,
    arg("--transfer", "ID", "only the transfer with this id (default: whichever is open)"),
    send_options(),
)
def cancel_transfer() -> None:
    """End an open transfer of weights, whoever opened it. The workers load the desired weights again.

    `rollbus status` lists open transfers with their owners. A transfer whose owner is gone ends by itself.

    Examples:
        rollbus cancel-transfer
        rollbus cancel-transfer --worker w0
    """


@command(
    "move all requests away from workers",
    "control:drain",
    arg("workers", "WORKER", "id of a worker, as in `rollbus status`", nargs="*"),
    flag("--one-by-one", "restart each worker: it drains and exits, and the next follows when it serves again"),
    flag("--all", "all workers; only with --one-by-one"),
    flag("--allow-none", "with --one-by-one, even if no other worker serves the model; its requests wait"),
    arg("--start-timeout", "TIME", "with --one-by-one, time for each worker to come back (default: 1800 seconds)"),
    arg("--socket", "PATH", "instead of WORKER: the --socket of a worker on this machine, without NATS", type=Path),
    send_options(has_worker=False),
)
def drain() -> None:
    """Drain workers: their requests in flight move to other workers, and they accept no requests until `rollbus
    resume`.

    The other workers resume the requests from the tokens that the clients have. A drained worker can be stopped without
    loss. With --socket, the worker drains itself and nothing is recorded: it stays drained until its process ends,
    whatever is resumed. The command then waits for the worker's --drain-s, or for --timeout-s, and exits with 4 if its
    clients did not take over in this time.

    With --one-by-one, nothing is recorded: each worker exits with code 0, and its supervisor must start it again. The
    command stops at the first worker that does not come back.

    Examples:
        rollbus drain w0 w1 --timeout-s 120
        rollbus resume --worker w0    # put w0 back into service
        rollbus drain --all --one-by-one    # on a new release
        rollbus drain --socket /run/rollbus/w0.sock
    """  # noqa: D205 - one long sentence


@command(
    "reset prefix caches", SENT, flag("--preempt", "also reset cached tokens of requests in flight"), send_options()
)
def flush_cache() -> None:
    """Reset the prefix caches of workers.

    If an engine cannot reset its cache while requests are in flight, the worker reports a failure. With --preempt,
    requests in flight lose their cached tokens, and the engine computes them again. After an update of the weights, a
    reset is not necessary: new requests never use the cache of older weights.

    Examples:
        rollbus flush-cache
        rollbus flush-cache --preempt --worker w0
    """


@command(
    "load or replace a LoRA adapter",
    "control:load_lora",
    arg("name", "NAME", "name of the adapter in requests"),
    *source_options("adapter"),
    arg("--version", "N", "version of the adapter (default: last version plus 1)", type=non_negative_int),
    send_options(),
)
def load_lora() -> None:
    """Load a LoRA adapter under a name for requests, or replace the adapter with that name.

    PATH is the folder of the adapter, with adapter_config.json and adapter_model.safetensors. Each worker looks for it
    on its own machine, below one of its --weight-root folders. With --upload the adapter goes to the workers through
    NATS.

    If a load fails, the previous adapter stays loaded. Workers that start later load the new adapter too.

    Examples:
        rollbus load-lora sql loras/sql --upload
        rollbus load-lora sql /models/loras/sql --version 7
    """


@command(
    "pause workers; new requests wait in the queue",
    SENT,
    arg("--mode", get_args(PauseMode), "treatment of requests in flight (default: keep)", default="keep"),
    flag("--clear-cache", "also reset the prefix cache"),
    send_options(),
)
def pause() -> None:
    """Pause workers: they pull no requests until `rollbus resume`, and new requests wait in the queue.

    With --mode keep, requests in flight stop and continue after the resume; no token is lost or repeated. With wait,
    requests in flight finish first. If that takes longer than --timeout-s, the command fails and the workers stay
    paused. With abort, requests in flight end immediately with the tokens that they have.

    Workers that start later are paused too, unless --worker is set.

    Examples:
        rollbus pause
        rollbus pause --mode wait --timeout-s 600
        rollbus pause --worker w0 --clear-cache
    """


@command("undo pause and drain", SENT, send_options())
def resume() -> None:
    """Undo `rollbus pause` and `rollbus drain`: workers accept requests again, and paused requests continue.

    A worker whose weight update failed does not resume. `rollbus status` shows its error.

    Examples:
        rollbus resume
        rollbus resume --worker w0
    """


@command(
    "release the memory of engines",
    SENT,
    arg("--level", (1, 2), "1: keep the weights in memory; 2: reload them on wake (default: 1)", type=int, default=1),
    send_options(),
)
def sleep() -> None:
    """Release the memory of engines until `rollbus wake`. Requests wait in the queue or go to other workers.

    Examples:
        rollbus sleep
        rollbus sleep --level 2 --worker w0
    """


@command(
    "lend the GPU of a worker",
    SENT,
    arg("worker", "WORKER", "id of the worker, as in `rollbus status`"),
    arg("--for", "TIME", "term, by the worker's clock, at most 7d (default: 1h)", dest="for_s"),
    flag("--allow-none", "lend it even if it is the last worker that serves its model"),
    arg("--timeout-s", "TIME", "seconds for the worker to free its memory (default: 60)"),
)
def lend() -> None:
    """Lend the GPU of a worker, for example to a trainer: the worker sleeps with nothing in the GPU's memory.

    At the end of the term the worker wakes if its memory is free. Otherwise it sleeps on, `rollbus status` shows who
    uses the GPU, and it tries again each minute. It never ends the borrower. Lend it again to renew the term. While it
    is lent, weight updates do not wait for it.

    Examples:
        rollbus lend w0
        rollbus lend w0 --for 20m --allow-none
        rollbus return w0
    """


@command(
    "end the loan of a worker",
    SENT,
    arg("worker", "WORKER", "id of the worker, as in `rollbus status`"),
    arg("--timeout-s", "TIME", "seconds for the worker to load its weights (default: 600)"),
)
def return_() -> None:
    """End the loan of a worker: it loads the recorded weights, verifies them, and then serves.

    If another process still uses the memory of its GPU, the command fails and the loan stays as it was.

    Examples:
        rollbus return w0
        rollbus return w0 --timeout-s 20m
    """


@command("unload a LoRA adapter", SENT, arg("name", "NAME", "name of the adapter in requests"), send_options())
def unload_lora() -> None:
    """Unload a LoRA adapter and abort the requests in flight that use it.

    The command fails if no worker has the adapter or should have it.

    Examples:
        rollbus unload-lora sql
        rollbus unload-lora sql --worker w0
    """


@command(
    "replace the weights of workers",
    "control:update_weights",
    *source_options("checkpoint"),
    arg("--version", "N", "version of the new weights (required unless --check)", type=non_negative_int),
    *SWITCH,
    arg(
        "--expected-canary", "FILE", "JSON of the canary from an earlier --json or the trainer (default: not compared)"
    ),
    flag("--check", "dry run: check that the workers can load these weights, change nothing"),
    send_options(),
)
def update_weights() -> None:
    """Replace the weights of all workers of a model while requests are in flight.

    PATH is the folder of a whole checkpoint: config.json and safetensors files. Each worker looks for it on its own
    machine and rejects it unless its real path is below one of the worker's --weight-root folders. With --upload, the
    folder is on this machine and goes to the workers through NATS.

    All workers first stage the weights while they serve: they fetch files from NATS and check every file, shape and
    dtype. If one worker rejects the weights, nothing changes. Then each worker pauses (--mode, as in `rollbus pause`),
    loads the weights, verifies them with a fixed prompt (the canary) and resumes. Every token has the version of its
    weights. A worker whose update failed serves no requests until a successful update or a restart; `rollbus status`
    shows the reason. A worker that starts later loads these weights before it serves.

    An update continues if this command is interrupted; `rollbus status` shows its progress.

    Examples:
        rollbus update-weights /models/step-7 --version 7 --check
        rollbus update-weights /models/step-7 --version 7
        rollbus update-weights out/step-7 --version 7 --upload --mode wait
    """


@command("undo sleep", SENT, send_options())
def wake() -> None:
    """Undo `rollbus sleep`.

    Examples:
        rollbus wake
        rollbus wake --worker w0
    """


@command(
    "store a checkpoint for the fleet, and load it",
    "weights:publish",
    arg("folder", "DIR", "folder of a whole checkpoint on this machine"),
    arg("--version", "N", "version of the weights", type=non_negative_int, required=True),
    arg("--model", "NAME", "name of the model (default: the only model of the fleet)"),
    arg("--base", "DIR", "folder of the last published version (default: store the whole checkpoint)"),
    flag("--store-only", "store the version without loading it on workers"),
    *SWITCH,
    arg("--timeout-s", "TIME", "seconds within which each worker must load the version (default: 600)"),
)
def publish_weights() -> None:
    """Publish a checkpoint through NATS, without a shared disk. All workers of the model then load it.

    DIR is the folder of a whole checkpoint on this machine. The command stores it in the bucket of the model as an
    anchor, a whole checkpoint. With --base, the folder of the last published version, it stores only the changes.
    Workers with that version then fetch only the changes. The content of --base must equal the published version; the
    command compares hashes.

    Only one program at a time may publish weights of a model. `rollbus weights` shows the published versions. A trainer
    publishes from its memory with rollbus.WeightPublisher.

    Examples:
        rollbus publish-weights out/step-7 --version 7
        rollbus publish-weights out/step-8 --version 8 --base out/step-7
        rollbus publish-weights out/step-9 --version 9 --base out/step-8 --store-only
    """


@command(
    "create the queue of a model, or set its limits",
    "admin:make_queue",
    arg("models", "MODEL", "name of a model", nargs="+"),
    arg("--max-requests", "N", "maximum number of waiting requests of all clients (default of a new queue: 65,536)"),
    arg("--max-bytes", "SIZE", "maximum size of waiting requests (default of a new queue: 1 GiB)"),
    arg("--max-per-client", "N", "maximum of them of one client in one lane (default of a new queue: 1,024)"),
    arg("--upload-bytes", "SIZE", "maximum size of the bucket for uploads of publishers (default: unchanged)"),
)
def make_queue() -> None:
    """Create the queues of models and the bucket of desired states, and set limits.

    Use this on a server with `rollbus auth`, where only admins may create queues. On other servers the workers create
    them. Existing queues stay unchanged. A limit changes only if an option sets it. It cannot be lower than the present
    content of the queue. --upload-bytes also creates the bucket if it is missing.

    Examples:
        rollbus make-queue my-model
        rollbus make-queue my-model --max-requests 100000 --upload-bytes 34359738368
    """


@command(
    "clear the desired state of workers",
    "admin:reset",
    arg("--model", "NAME", "name of the model (default: every live model)"),
)
def reset() -> None:
    """Clear the desired state of workers: pause, weights and adapters. Use this if the state no longer fits the model.

    Running workers keep their weights, undo a pause and unload adapters. Workers that start later use the weights of
    their options.

    Examples:
        rollbus reset
        rollbus reset --model my-model
    """


@command("forget a model without workers", "admin:forget_model", arg("model", "MODEL", "name of the model"))
def forget_model() -> None:
    """Forget a model that the fleet no longer serves: delete its queue and its desired state.

    A client that names no model needs a fleet with exactly one known model. A model is known from its first worker, or
    from `make-queue`, until this command. The command fails if a worker of the model lives, or if its queue has
    requests. On a server with `rollbus auth` it needs the credentials of an admin. Published weights stay.

    Examples:
        rollbus status
        rollbus forget-model old-model
    """


@command(
    "sign data that was stored without a root key",
    "admin:sign",
    arg("--model", "NAME", "name of the model (default: every model)"),
    arg("--objects", "BUCKET/PREFIX", "also sign this upload; may be repeated", action="append", default=[]),
)
def sign() -> None:
    """Sign stored desired states and uploads from before the fleet had its root key, or from before a new root key.

    Programs whose credentials contain a root key ignore unsigned data. This command signs the present desired states
    and the uploads that they name. It does not check who wrote them, so check them first with `rollbus status`. It
    requires the credentials of an admin.

    Examples:
        rollbus sign --creds auth/default/admin-admin.creds
        rollbus sign --model my-model --objects BUCKET/PREFIX
    """
