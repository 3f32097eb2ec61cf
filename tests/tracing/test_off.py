"""Without tracing, OpenTelemetry is not imported.

If tracing is requested and impossible, the error names the reason.
"""

import subprocess
import sys

import pytest

import rollbus
from rollbus.bus.tracing.spans import make_tracer
from rollbus.schemas.errors import InvalidRequest
from rollbus.workers.__main__ import main

PROGRAM = """
import asyncio, sys
import httpx
import rollbus
from rollbus.frontend.http.server import listen, serving
from rollbus.frontend.http.settings import Settings
from rollbus.workers import __main__
from rollbus.workers.config import WorkerConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker

async def run(url, fleet):
    worker = Worker(WorkerConfig(nats_url=url, fleet=fleet, model="m", listen_s=0.0), SyntheticEngine())
    listening = listen("127.0.0.1", 0)
    address = "http://127.0.0.1:%d" % listening.getsockname()[1]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        async with rollbus.connect(url, fleet=fleet) as rb, serving(rb, Settings(), listening):
            await rb.fleet.wait_for_workers()
            async with httpx.AsyncClient(base_url=address) as http:
                body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
                answer = await http.post("/inference/v1/generate", json=body, headers={"traceparent": sys.argv[3]})
                assert answer.status_code == 200, answer.text
        worker.stop()

asyncio.run(run(*sys.argv[1:3]))
print(sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry"))
"""


def test_opentelemetry_is_not_imported_without_tracing(nats_url: str, fleet: str) -> None:
    """A client, a worker and an HTTP service without tracing serve a traced request and do not import OpenTelemetry."""
    trace = f"00-{'a' * 32}-{'b' * 16}-01"

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, nats_url, fleet, trace], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the import of OpenTelemetry fail, as if the extra were not installed."""
    monkeypatch.delitem(sys.modules, "rollbus.bus.tracing.otel", raising=False)
    monkeypatch.delattr("rollbus.bus.tracing.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.usefixtures("not_installed")
def test_the_error_names_the_missing_extra(capsys: pytest.CaptureFixture[str]) -> None:
    """If the extra is missing, the client fails before it connects, and the worker with a usage error.

    Without tracing there is no error.
    """
    with pytest.raises(InvalidRequest, match=r"tracing needs opentelemetry, which is not installed.*\[otel\]"):
        rollbus.connect(tracing=True)
    assert main(["--engine", "synthetic", "--otel"]) == 2
    assert "--otel needs opentelemetry" in capsys.readouterr().err
    assert repr(rollbus.connect(tracing=False))


@pytest.mark.parametrize("wrong", [None, 1, "yes", object()])
def test_only_a_provider_of_the_sdk_is_accepted(wrong: object) -> None:
    """Only a provider of OpenTelemetry's SDK is accepted.

    Other providers cannot give a span the id that its request carries.
    """
    with pytest.raises(InvalidRequest, match="True, False or a TracerProvider"):
        rollbus.connect(tracing=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "'many'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "max_queue_size"),
    ],
)
def test_an_invalid_environment_variable_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    """An invalid environment variable is an error, because spans would otherwise be lost silently."""
    monkeypatch.setenv(name, value)

    with pytest.raises(InvalidRequest, match=said):
        make_tracer(True, service_name="test")


def test_otel_sdk_disabled_disables_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`OTEL_SDK_DISABLED` disables tracing."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert make_tracer(True, service_name="test") is None


def test_attribute_names_equal_the_names_in_the_conventions_of_opentelemetry() -> None:
    """The constants for attribute names equal the names in the installed conventions of OpenTelemetry."""
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes, url_attributes
    from opentelemetry.semconv.attributes import error_attributes, http_attributes

    from rollbus.bus.tracing import names

    theirs = (gen_ai_attributes, messaging_attributes, url_attributes, error_attributes, http_attributes)
    known = {value for module in theirs for name, value in vars(module).items() if name.isupper()}
    ours = {
        name: value
        for name in filter(str.isupper, vars(names))
        if not (value := getattr(names, name)).startswith("rollbus.")
    }

    assert {name: value for name, value in ours.items() if value not in known} == {}
