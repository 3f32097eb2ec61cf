import ast
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbus.bus.logs import EVENT, JsonFormatter, RejectionCount, adopted

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bus", "frontend", "schemas", "trainer", "workers")
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


def line_of(message: object, *args: object, **more: Any) -> dict[str, Any]:
    """Return the JSON line of `logger.info(message, *args)`."""
    record = logging.LogRecord("some.logger", logging.INFO, "file.py", 1, message, args, more.get("exc_info"))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_an_event_and_its_fields_are_a_line() -> None:
    """A log line has separate time, level, logger, event and fields. The event may contain a formatted part."""
    line = line_of("worker.%s worker=%s reason=%s", "paused", "w0", "it was told to")

    assert line.pop("time").endswith("Z")
    fields = {"worker": "w0", "reason": "it was told to"}
    assert line == {"level": "info", "logger": "some.logger", "event": "worker.paused", "fields": fields}


def test_numbers_stay_numbers() -> None:
    """Numbers, booleans and None are JSON values, rounded as in the text. Other values become text."""
    values = (3, 1.23456, float("nan"), None, True, {"a": 1}, ValueError("no"), "x")
    line = line_of("an.event n=%d s=%.3f nan=%.1f none=%s yes=%s map=%s error=%s text=%r", *values)

    assert line["fields"] == {
        "n": 3,
        "s": 1.235,
        "nan": "nan",
        "none": None,
        "yes": True,
        "map": "{'a': 1}",
        "error": "no",
        "text": "x",
    }


def test_a_dict_alone_is_a_field() -> None:
    """A single dict argument, which logging treats as named arguments, becomes one field."""
    assert line_of("an.event map=%s", {"a": 1})["fields"] == {"map": "{'a': 1}"}


@pytest.mark.parametrize(
    ("message", "args"), [("Started server process [%d]", (7,)), ("100%", ()), ("see http://a.b", ())]
)
def test_a_log_line_of_another_library_is_a_message(message: str, args: tuple[object, ...]) -> None:
    """A line that is not an event of rollbus has the event `message`, with its text in the field `message`."""
    line = line_of(message, *args)

    assert (line["event"], line["fields"]) == ("message", {"message": message % args if args else message})


def test_a_traceback_is_text_of_the_same_line() -> None:
    """A traceback is a field of the same line."""
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        line = line_of("an.event", exc_info=sys.exc_info())

    assert line["traceback"].startswith("Traceback")
    assert line["traceback"].endswith("ValueError: first\nsecond")


def test_users_and_passwords_of_urls_are_left_out() -> None:
    """User and password of a URL are absent from fields, messages, tracebacks and lines of other processes."""
    url = "nats://user:geheim@host:4222"
    try:
        raise ValueError(url)
    except ValueError:
        lines = [line_of("an.event url=%s error=%s", url, ValueError(url), exc_info=sys.exc_info()), line_of(url)]

    shown = json.dumps(lines) + adopted(f"cannot reach {url}", "w0")
    assert shown.count("nats://***@host:4222") == 5
    assert "geheim" not in shown


def test_a_line_of_another_process_has_the_name_of_its_process() -> None:
    """A JSON line of another process keeps its fields and gets the name of its process.

    Other output becomes a message.
    """
    assert json.loads(adopted('{"event": "a.b", "fields": {"n": 1}}', "w0")) == {
        "event": "a.b",
        "fields": {"n": 1},
        "process": "w0",
    }
    for text in ("Segmentation fault", "[1]", "7", ""):
        line = json.loads(adopted(text, "w0"))
        assert (line["event"], line["fields"], line["process"]) == ("message", {"message": text}, "w0")


def test_every_logger_call_of_the_packages_is_an_event() -> None:
    """Each logger call of the packages has a constant event name with named fields."""
    found, others = 0, []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_log"), attr=method), args=[first, *_]):
                    if method not in METHODS:
                        continue
                    is_event = isinstance(first, ast.Constant) and EVENT.fullmatch(str(first.value))
                    found += 1
                    if not is_event:
                        others.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert others == []
    assert found > 50


def test_rejections_are_counted_and_logged_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rejected messages, one a second is logged, with the number of all so far."""
    now = 100.0
    monkeypatch.setattr("rollbus.bus.logs.time.monotonic", lambda: now)
    rejected = RejectionCount()
    lines = []
    for number in range(1000):
        now = 100.0 + number / 400
        lines.append(rejected.add())

    assert [line for line in lines if line] == [1, 401, 801]
    assert rejected.so_far == 1000
