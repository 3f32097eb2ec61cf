"""Subcommands that run on this machine: fleets, services and files of settings, and programs that use a fleet."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ....schemas.limits import DEFAULT_MAX_IN_FLIGHT, MAX_TIMEOUT_S
from ....schemas.options import (
    ENGINE_OPTIONS,
    OTEL,
    PROCESS_OPTIONS,
    RAY_OPTIONS,
    Option,
    arg,
    duration,
    flag,
    non_negative_int,
)
from ...http import Settings
from ..arguments import command, group

DEFAULT_ADDRESS: Final = "127.0.0.1:8080"
DEFAULT_LISTEN: Final = "127.0.0.1:4222"
SINGLE: Final = ("admin", "frontend", "viewer")
"""Roles for which `auth init` creates one user by default, with the name of the role."""
ROLES: Final = ("trainer", "worker", *SINGLE)
"""Roles of users that have only a name; publishers also have models."""
TOKENIZER: Final = arg(
    "--tokenizer", "DIR", "folder of the tokenizer (default: model folder of a worker on this machine)"
)


def host_name(text: str) -> str:
    """Parse a host name without a port and return it in lower case."""
    if not re.fullmatch(r"[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host name such as fleet.example.com")
    return text.lower()


def request_timeout(text: str) -> float:
    """Parse the timeout of a request."""
    value = duration(text)
    if value > MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_TIMEOUT_S:g}")
    return value


def number_or_none(text: str) -> int | None:
    """Parse an integer of at least 0, or `none`."""
    return None if text == "none" else non_negative_int(text)


def matching(pattern: str, what: str) -> Callable[[str], str]:
    """Return the parser of texts that match a pattern completely. `what` describes them in errors."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return parse


cluster_name = matching(r"[A-Za-z0-9_-]{1,64}", "a cluster name; allowed: up to 64 letters, digits, '_' and '-'")
store_size = matching(r"[1-9]\d{0,11}[KMGT]B", "a size such as 50GB")


def many(name: str, value: str, text: str, **settings: Any) -> Option:
    """Return an option with a value that may be repeated."""
    return arg(name, value, f"{text}; may be repeated", action="append", default=[], **settings)


def http_options(http: str | None, default: str) -> tuple[Option, ...]:
    """Return the options of the HTTP service, with the names of `Settings` in the parsed arguments.

    vLLM has the same names for the options of its parsers.

    Args:
        http: default address, for the option's value.
        default: default address, for its help text.
    """
    settings = Settings()

    def setting(name: str, value: str, text: str, dest: str, **own: Any) -> Option:
        return arg(name, value, f"{text} (default: %(default)g)", dest=dest, default=getattr(settings, dest), **own)

    return (
        arg("--http", "HOST:PORT", f"address of the HTTP service (default: {default})", default=http),
        many("--allowed-host", "NAME", "name of the service for clients (default: the host of --http)", type=host_name),
        TOKENIZER,
        arg("--tool-call-parser", "NAME", "vLLM's parser of tool calls, such as hermes (default: none: no tools)"),
        arg("--reasoning-parser", "NAME", "vLLM's parser of reasoning, such as qwen3 (default: none: it is content)"),
        arg("--default-model", "NAME", "model or adapter of requests that name none (default: the only known model)"),
        setting("--request-timeout", "TIME", "timeout of requests that set none", "timeout_s", type=request_timeout),
        setting(
            "--max-wait",
            "TIME",
            "time that a request waits while no worker serves and one starts, updates or is paused; then it gets 503",
            "max_wait_s",
            type=request_timeout,
        ),
        flag("--return-tokens", "return token ids and log probabilities in every answer", dest="returns_tokens"),
        flag("--routed-experts-npy", "return routed experts as vLLM's base64 .npy string in every choice"),
        flag("--trust-traceparent", "let traceparents of clients decide what is sampled", dest="trusts_traceparent"),
        setting("--max-in-flight", "N", "concurrent requests for tokens; further ones get status 429", "max_in_flight"),
        setting("--client-timeout", "TIME", "time for a client to send, and to read each part", "client_timeout_s"),
        setting("--stop-timeout", "TIME", "time for open requests to finish when the service stops", "stop_timeout_s"),
        setting("--prefill-min-tokens", "N", "least tokens of a prompt for a prefill worker", "prefill_min_tokens"),
    )


def user_option(role: str) -> Option:
    """Return the option of `auth` that names a user of a role."""
    default = f" (init always creates one with the name {role})" if role in SINGLE else ""
    return many(f"--{role}", "NAME", f"name of a user with the role {role}{default}")


def tls_file(name: str, text: str) -> Option:
    """Return the option of a file for TLS, by default none."""
    return arg(name, "FILE", text, default="", type=None)


CLIENT_CA: Final = tls_file("--client-ca", "CA that must have signed the certificates of clients (default: none)")


def cert_options(what: str, side: str) -> tuple[Option, Option]:
    """Return the options of `nats init` for a certificate and its key."""
    text = f"path of the certificate for {side}, the same on each machine (default: no TLS)"
    return (
        tls_file(f"--{what}-cert", text),
        tls_file(f"--{what}-key", "path of the certificate's key, the same on each machine"),
    )


@command(
    "run NATS, workers and the HTTP service on this machine",
    "local.up:run",
    arg("--config", "FILE", "settings as TOML, each key an option; `rollbus init` writes one (default: none)"),
    arg("--model", "DIR|ID", "folder of the checkpoint, or its id on Hugging Face (default: a tiny MoE)"),
    arg("--workers", "N", "number of workers (default: 1)", default=1),
    arg("--prefill-workers", "N", "number of prefill workers (default: 0)", type=non_negative_int, default=0),
    arg(
        "--gpus-per-worker", "K", "GPUs of each worker; 0: all (default: those its engine uses)", type=non_negative_int
    ),
    *http_options(None, f"{DEFAULT_ADDRESS}, or a free port if that port is in use"),
    *ENGINE_OPTIONS,
    arg("--state-dir", "DIR", "folder of the tiny MoE (default: ~/.cache/rollbus)"),
    flag("--secure", "accept only connections with credentials"),
    arg("--auth-dir", "DIR", "folder of the credentials (default: the folder auth in --state-dir)"),
)
def up() -> None:
    """Run everything on this machine until Ctrl-C: a NATS server, workers and the HTTP service.

    Without --model, the workers serve a tiny mixture-of-experts model that the command creates. The NATS server listens
    at --nats. The default is port 4222, or a free port if that port is in use. The HTTP service listens at --http. The
    default is port 8080, or a free port. The service reads bearer tokens from ROLLBUS_HTTP_TOKEN and
    ROLLBUS_ADMIN_TOKEN. It answers to the names of --allowed-host, to localhost and to addresses.

    Prefill workers compute prompts for decode workers. They share KV through a temporary folder, or as set by
    --kv-transfer-config. With --gpus-per-worker 0, all workers see all GPUs.

    stderr shows the state and the start time in seconds of each worker: starting (the process runs), loading (the
    engine loads) or serving. On a terminal, logs go to a file that the command names at the start; with -v also to
    stderr. If stderr is not a terminal, or with --log-format json, logs go to stderr and there is no file.

    With --secure, the server accepts only users with credentials. Each user has the permissions of its role. The
    command creates the users of workers, HTTP service and other roles in --auth-dir, and uses them again in the next
    run.

    If a worker exits unexpectedly, the command restarts it after 1 s, then 2, 4 ... 60 s, up to five times in ten
    minutes. After that the worker is not restarted, and the other workers continue. A worker is also not restarted if
    it exited on request, got a wrong option, or its id is in use. If the last worker or the NATS server exits, the
    command stops everything and exits with 1.

    Examples:
        rollbus up
        rollbus up --engine synthetic --workers 4
        rollbus up --model Qwen/Qwen3-0.6B --workers 2 --engine-args '{"max_model_len": 8192}'
        rollbus up --secure --auth-dir auth
    """


@command(
    "run one worker",
    "options:run_worker",
    arg("--model", "DIR|ID", "folder of the checkpoint, or its id on Hugging Face (required for the engine vllm)"),
    *ENGINE_OPTIONS,
    *PROCESS_OPTIONS,
)
def worker() -> None:
    """Run one worker: one process with one engine that pulls requests from NATS.

    This process becomes the worker: signals and the exit code are those of the worker. Logs go to stderr.

    Examples:
        rollbus worker --engine synthetic --served-model-name my-model
        rollbus worker --model /models/qwen3 --weight-root /models --worker-id w0
    """


@command(
    "run a fleet on a Ray cluster",
    "options:run_ray",
    arg("action", ("up", "down"), "start a fleet; end a fleet"),
    *RAY_OPTIONS,
    *ENGINE_OPTIONS,
)
def ray() -> None:
    """Run a fleet on a Ray cluster: NATS, and each worker as an actor in a placement group of its own.

    The command needs the extra ray. It runs until Ctrl-C; with --detach until `rollbus ray down`. Without --nats, the
    NATS servers run inside the cluster. A worker that ends is started again, on any node with room.

    Examples:
        rollbus ray up --model /models/qwen3 --workers 64 --gpus-per-worker 8
        rollbus ray up --engine synthetic --workers 4 --detach
        rollbus ray down
    """


@command(
    "serve the fleet over HTTP",
    "local.http:run",
    *http_options(DEFAULT_ADDRESS, "%(default)s; port 0: any free port"),
    OTEL,
)
def frontend() -> None:
    """Serve the fleet over HTTP, for clients of vLLM, OpenAI and Dynamo.

    Without --http, only this machine can reach the service. The service reads bearer tokens from the environment:
    ROLLBUS_HTTP_TOKEN for requests, ROLLBUS_ADMIN_TOKEN for routes that change the fleet. With --json, the command
    prints one line {"http": URL} when the service is ready.

    Examples:
        rollbus frontend
        rollbus frontend --http 127.0.0.1:8000
        ROLLBUS_HTTP_TOKEN=secret rollbus frontend --http 0.0.0.0:8080 --allowed-host fleet.example.com
        curl -s http://127.0.0.1:8080/v1/models    # in a second terminal
    """


@command(
    "write a file of settings for `rollbus up`",
    "local.up:run_init",
    arg("file", "FILE", "file to write (default: fleet.toml)", nargs="?", default=Path("fleet.toml")),
    arg("--systemd", "FILE", "also write a unit of systemd (default: none)"),
    arg("--units", "DIR", "write units of systemd for NATS, workers and the HTTP service into DIR, and nothing else"),
    arg("--env", "FILE", "also write a file of variables (default: none)"),
)
def init() -> None:
    """Write a commented file of settings for `rollbus up --config`.

    The file has every option of `rollbus up`, with its help and its default. --systemd also writes a unit that runs the
    fleet, and --env a file of environment variables with new tokens for the HTTP service. The unit reads that file, and
    so does `docker compose`. --units writes units for machines of a fleet without `rollbus up`. Existing files are not
    overwritten.

    Examples:
        rollbus init
        rollbus init --units /etc/systemd/system
        rollbus init fleet.toml --systemd fleet.service --env fleet.env
    """


@command(
    "users of a NATS server: keys and permissions",
    "auth:run",
    arg("action", ("init", "remove", "certify"), "create or add users; remove users; renew certificates"),
    arg("files", "FILE", "credentials files (for the action certify)", nargs="*"),
    arg("--dir", "DIR", "folder of the users", required=True),
    group(
        "users",
        *map(user_option, (*ROLES,)),
        many("--publisher", "NAME:MODEL", "trainer that may also replace the weights of MODEL (for remove, NAME)"),
    ),
    group(
        "configuration of the server, which init creates and never changes",
        arg("--listen", "HOST:PORT", f"address of the server (default: {DEFAULT_LISTEN})"),
        tls_file("--server-cert", "certificate for TLS (default: no TLS)"),
        tls_file("--server-key", "key of the TLS certificate (default: no TLS)"),
        CLIENT_CA,
    ),
    reads_no_credentials=True,
)
def auth() -> None:
    """Manage the users of a NATS server with their roles and permissions.

    `rollbus auth init --dir DIR --trainer alice --worker w0` creates a key for each user and a configuration for
    nats-server. Each key is in a file that only its owner can read. The server then accepts only these users. Run
    `init` again to add users; existing keys stay. `rollbus auth remove` removes users. Both commands take effect after
    the server reloads its configuration: `nats-server --signal reload`.

    Commands, desired states and uploads are signed. `init` creates the root key of the fleet, DIR/<fleet>/root.seed.
    The root key certifies which user may sign which data. No running program needs it. `rollbus auth certify --dir DIR
    FILE...` renews the certificates in credentials files that were moved out of DIR.

    A program connects as a user with `--creds FILE` or $ROLLBUS_CREDS. Each trainer, worker and frontend needs its own
    user, because the user's name is part of its subjects.

    Examples:
        rollbus auth init --dir auth --trainer alice --worker w0
        rollbus auth init --dir auth --publisher bob:my-model
        rollbus auth remove --dir auth --trainer alice
    """


@command(
    "servers of a NATS cluster: configuration",
    "auth:run_nats",
    arg("action", ("init",), "write configurations"),
    group(
        "init",
        arg("--nodes", "HOST[:PORT],...", "three or more servers; the port of routes is PORT + 2000"),
        arg("--dir", "DIR", "folder of the files (default: %(default)s)", default=Path("nats")),
        arg("--cluster", "NAME", "name of the cluster (default: %(default)s)", type=cluster_name, default="rollbus"),
        arg(
            "--store-dir", "DIR", "folder of streams on a machine (default: %(default)s)", default=Path("/var/lib/nats")
        ),
        arg("--max-file-store", "SIZE", "disk space of a server (default: 50GB)", type=store_size, default="50GB"),
        *cert_options("server", "clients"),
        *cert_options("cluster", "the other servers"),
        CLIENT_CA,
        tls_file("--cluster-ca", "CA that signed the certificates of the other servers (required with --cluster-cert)"),
    ),
    reads_no_credentials=True,
)
def nats() -> None:
    """Write the configurations of the servers of a NATS cluster.

    `rollbus nats init --nodes A,B,C --dir DIR` writes a configuration for each of three or more servers into DIR, which
    also contains the users (see `rollbus auth`). The configuration has JetStream, routes with their own password, and
    TLS if certificate files are given. Each server has its own folder in --store-dir. The queue of a model reserves 5
    GiB of --max-file-store. The command prints the next steps.

    Examples:
        rollbus nats init --nodes a.example,b.example,c.example --dir nats
        rollbus nats init --nodes a,b,c --server-cert server.pem --server-key server.key
    """


@command(
    "tour: answer real questions with a real engine",
    "tour:run",
    arg("--input", "FILE", "prompts as JSONL, as for `generate` (default: examples/questions.jsonl)"),
    arg("--max-tokens", "N", "maximum tokens per prompt (default: 64)", default=64),
    arg("--state-dir", "DIR", "folder of the tiny MoE (default: ~/.cache/rollbus)"),
)
def demo() -> None:
    """The tour: answer real questions with a real vLLM engine through a temporary NATS server.

    The tour needs no GPU, no model and no server. It creates a tiny mixture-of-experts model. The model is not trained,
    so its text is noise. All else is the same as with a trained model.

    Examples:
        rollbus demo
        rollbus demo --max-tokens 16
    """


@command(
    "generate results for the prompts of a file or data set",
    "generate.command:run",
    arg("--input", "FILE", "JSONL or parquet file, -, or a data set's directory or name", required=True, type=None),
    arg("--output", "FILE", "file of results: JSONL, or .parquet", required=True),
    arg("--subset", "NAME", "subset of the data set (default: its only one)"),
    arg("--split", "NAME", "split of the data set (default: its only one)"),
    flag("--stream", "read a data set of the Hub row by row, without a copy on this machine"),
    arg("--prompt-field", "NAME", "field of the prompt (default: the one that a row has)"),
    arg("--row-options", ("read", "keep"), "known options in a row of data: use or keep them (default: an error)"),
    arg("--messages", ("drop-last", "continue"), "last turn of the assistant: drop or continue it (default: an error)"),
    flag("--with-prompt", "add the prompts and their token ids to the results"),
    arg(
        "--routed-experts",
        ("inline", "npz", "none"),
        "routed experts: base64 in each line, arrays in an .npz beside the output, or none (default: %(default)s)",
        default="inline",
    ),
    TOKENIZER,
    arg("--max-in-flight", "N", "maximum requests in flight (default: %(default)s)", default=DEFAULT_MAX_IN_FLIGHT),
    arg("--record", "DIR", "directory for a record of the run (default: none)"),
    arg("--model", "NAME", "name of the model (default: the only model of the fleet)"),
    arg("--max-tokens", "N", "maximum tokens per sample (default: 16)"),
    arg("--temperature", "T", "temperature, 0 (greedy) to 2 (default: 1)", type=float),
    arg("--top-p", "P", "nucleus sampling, above 0 up to 1 (default: 1)", type=float),
    arg("--top-k", "K", "number of most likely tokens to sample from; 0: all (default: 0)", type=int),
    arg("--seed", "N", "seed of every prompt (default: none)", type=non_negative_int),
    arg("-n", "N", "samples per prompt (default: 1)"),
    arg("--timeout-s", "TIME", "timeout of each request in seconds (default: 3600)"),
)
def generate() -> None:
    """Generate a result for every prompt of a data set and write the results to a file.

    The input is JSONL (a file, or - for stdin), parquet, or a data set of Hugging Face by name or directory. A row
    holds "prompt" (text, token ids or messages), "prompt_token_ids" or "messages"; --prompt-field names another field.
    Lines of OpenAI's batch API work too. A row may set any field of SamplingParams ("max_tokens", "temperature",
    "seed", ...) and GenerateRequest. The options below set the fields that a row does not set. A row with any other
    field is data: it stands under "row" in its result, and known options in it need --row-options.

    The output is JSONL, or parquet if its name ends with .parquet. It has one object for each prompt, in the order in
    which the prompts end. "index" is the position of the prompt in the input, counted from 0. The command checks the
    input (of a stream the first 1,000 rows) before it sends the first request. The object of a prompt that fails has an
    "error", and the command exits with 1. Run the same command again to continue after an interruption, or to retry
    failed prompts. Without a model, the model that answered the first prompt answers all.

    Examples:
        echo '{"prompt_token_ids": [1, 2, 3]}' > prompts.jsonl
        rollbus generate --input prompts.jsonl --output results.jsonl --max-tokens 32
        rollbus generate --input prompts.jsonl --output four.jsonl -n 4 --temperature 0.8 --routed-experts npz
        rollbus generate --input openai/gsm8k --subset main --split test --prompt-field question --output gsm8k.parquet
    """


@command(
    "measure throughput and latency of the fleet",
    "bench:run",
    arg("--model", "NAME", "name of the model (default: the only model of the fleet)"),
    arg("--concurrency", "N", "requests open at once, in turn (default: 64 256)", nargs="+", default=[64, 256]),
    arg("--requests", "N", "requests of a round (default: 4 times the concurrency, at least 32)", dest="num_requests"),
    arg("--input-tokens", "N", "tokens of each prompt (default: %(default)s)", default=128),
    arg("--output-tokens", "N", "tokens of each answer (default: %(default)s)", default=128),
    arg("--logprobs", "K", "field logprobs of requests, or none (default: 0)", type=number_or_none, default=0),
    arg("--routing", None, "request routed experts (default: if it has some)", action=argparse.BooleanOptionalAction),
    arg("--rounds", "N", "number of rounds (default: %(default)s)", default=5),
    flag("--stream", "stream chunks and measure their times", dest="streams"),
    arg("--seed", "N", "seed of the prompts (default: 0)", type=non_negative_int, default=0),
)
def bench() -> None:
    """Measure the throughput and latency of a fleet as a trainer sees them.

    The bench sends prompts of random token ids. --concurrency requests are open at once, and each generates
    --output-tokens tokens. No prompt is in a prefix cache. The result is the median of the rounds with the lowest and
    the highest value. A warm-up round is not counted. With --stream, the bench reads chunks one by one and measures
    their times. If requests fail, the command counts them by error and exits with 1.

    Examples:
        rollbus bench --concurrency 16 --rounds 1
        rollbus bench --stream --routing
        rollbus bench --input-tokens 1024 --output-tokens 256 --json
    """


@command(
    "print the completion script of a shell",
    "app:print_completion",
    arg("shell", "SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish")),
)
def completion() -> None:
    """Print a script that completes commands and options of `rollbus` in your shell.

    Examples:
        rollbus completion bash    # into ~/.local/share/bash-completion/completions/rollbus
        rollbus completion zsh     # into _rollbus in a directory of $fpath
        rollbus completion fish    # into ~/.config/fish/completions/rollbus.fish
    """
