"""A trace collector for tests, which receives OTLP over HTTP in a thread of the test process and stores the spans."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.waits import until_true


@dataclass(frozen=True)
class ReceivedSpan:
    """One received span."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    tracestate: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    links: list[tuple[str, str]]
    error: str | None


@dataclass
class Collector:
    """The received spans and the configured answer."""

    url: str = ""
    status: int = 200
    """The HTTP status of each answer."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Requests wait for their answer until this event is set."""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def named(self, name: str) -> list[ReceivedSpan]:
        """Return the spans with this first word in their names, in the order of their start."""
        found = [span for span in self.spans if span.name.split(" ")[0] == name]
        return sorted(found, key=lambda span: span.start_ns)

    async def until(self, name: str, count: int) -> list[ReceivedSpan]:
        """Wait for at least `count` spans with this name and return them."""
        await until_true(lambda: len(self.named(name)) >= count)
        return self.named(name)

    def take(self, body: bytes) -> None:
        """Decode a request and store its spans."""
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(of_resource.resource.attributes)["service.name"]
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            service=service,
                            name=span.name,
                            kind=span.kind,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            tracestate=span.trace_state,
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes=_values(span.attributes),
                            events=[(event.name, event.time_unix_nano) for event in span.events],
                            links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                            error=span.status.message if span.status.code == 2 else None,
                        )
                    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector until the block ends."""
    received = Collector()
    received.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.answers.wait()
            if received.status == 200:
                zipped = self.headers.get("Content-Encoding") == "gzip"
                received.take(gzip.decompress(body) if zipped else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(received.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield received
    finally:
        received.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
