"""The log of a rollbus process on stderr: text for people, or one JSON object per line for programs.

The packages log an event and its fields, `logger.info("worker.ready worker=%s slots=%d", ...)`. Both formats use these.
A library sets up no logs: this module is for the programs `rollbus` and `rollbus worker`.
"""

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, TextIO

LogFormat = Literal["text", "json"]

EVENT: Final = re.compile(r"([\w%]+(?:\.[\w%]+)+)((?: \w+=%[-.\d]*[a-z])*)")
"""The form of a log message of the packages: the name of the event, and a placeholder for each field."""
LOG_VARIABLE: Final = "ROLLBUS_LOG"
"""Variable in which a supervisor names the log file that gets what its workers print."""
MESSAGE: Final = "message"
"""The event of log lines from other packages, and the field with their text."""

REJECTIONS_S: Final = 1.0
"""Seconds between two log lines about rejected messages: a peer may send thousands of them in a second."""

_FIELD: Final = re.compile(r" (\w+)=(%[-.\d]*[a-z])")
_PLACEHOLDER: Final = re.compile(r"%[a-z]")
_USER_OF_URL: Final = re.compile(r"(?<=://)\S*@")
_STDERR: Final = 2
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up(level: int | str, log_format: LogFormat, text: str = TEXT) -> None:
    """Log on stderr from now on, unless this process already has log handlers.

    In JSON format, Python warnings and uncaught exceptions are log lines as well.

    Args:
        level: the lowest level that is logged.
        text: the format of text lines.
    """
    if log_format == "text":
        handler: logging.Handler = _TextHandler()
        handler.setFormatter(TextFormatter(text))
    else:
        handler = LineHandler()
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread
    logging.basicConfig(level=level, handlers=[handler])


def is_json() -> bool:
    """Return True if `set_up` made this process log JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class JsonFormatter(logging.Formatter):
    """Formats one JSON object: `time`, `level`, `logger`, `event`, `fields`, and `traceback` if there is one.

    Fields that are numbers, true, false or null keep their type. All other fields are text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        event, fields = _event_of(record)
        line: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            "fields": fields,
        }
        if record.exc_info:
            line["traceback"] = _without_users(self.formatException(record.exc_info))
        return json.dumps(line)


class _TextHandler(logging.StreamHandler[TextIO]):
    """Writes to the present `sys.stderr`. A progress line replaces `sys.stderr` with itself, to stay below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        self.setStream(sys.stderr)
        super().emit(record)


class LineHandler(logging.Handler):
    """Writes each line to stderr immediately and completely.

    It bypasses `sys.stderr`, because vLLM adds a prefix to each line there in its processes.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line."""
        try:
            write_line(self.format(record))
        except Exception:  # noqa: BLE001
            # Boundary of logging: a record that cannot be written must not fail the code that logs it.
            self.handleError(record)


class RejectionCount:
    """Counts the rejected messages of one kind, and limits their log to one line in `REJECTIONS_S`."""

    def __init__(self) -> None:
        self.so_far = 0
        self._next_at = -math.inf

    def add(self) -> int:
        """Count a message. Return the number so far if a line is due, else 0."""
        self.so_far += 1
        now = time.monotonic()
        if now < self._next_at:
            return 0
        self._next_at = now + REJECTIONS_S
        return self.so_far

    def warn(self, log: logging.Logger, event: str, *fields: object) -> None:
        """Count a message. If a line is due, log the event with the number so far before the last field, the error."""
        if so_far := self.add():
            log.warning(event, *fields[:-1], so_far, fields[-1])


@contextmanager
def warning_of(
    kinds: type[Exception] | tuple[type[Exception], ...], log: logging.Logger, event: str, *fields: object
) -> Iterator[None]:
    """Log an exception of these kinds that the block raises, as the last field of a warning, and go on after it."""
    try:
        yield
    except kinds as error:
        log.warning(event, *fields, error)


def write_line(line: str) -> None:
    """Write a line on stderr, unless a full disk or a closed terminal does not take it."""
    rest = f"{line}\n".encode()
    with suppress(OSError):
        while rest:
            rest = rest[os.write(_STDERR, rest) :]


def adopt_line(line: str, process: str) -> str:
    """Return a log line of another process as a JSON object with the process name. Other text becomes a message."""
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        now = _iso(datetime.now(UTC).timestamp())
        fields = {MESSAGE: _without_users(line)}
        value = {"time": now, "level": "info", "logger": process, "event": MESSAGE, "fields": fields}
    return json.dumps({**value, "process": process})


class TextFormatter(logging.Formatter):
    """Formats a line of text without users and passwords in URLs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        return _without_users(super().format(record))


def _event_of(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    found = EVENT.fullmatch(record.msg) if isinstance(record.msg, str) else None
    if found is None:
        return MESSAGE, {MESSAGE: _without_users(record.getMessage())}
    # A dict that is the only argument is not in a tuple: see LogRecord.
    args = iter(record.args if isinstance(record.args, tuple) else (record.args,))
    event = _PLACEHOLDER.sub(lambda _: str(next(args)), found[1])
    return event, dict(_fields(found[2], args))


def _fields(template: str, args: Iterator[object]) -> Iterator[tuple[str, Any]]:
    for (name, placeholder), value in zip(_FIELD.findall(template), args, strict=True):
        if isinstance(value, float):
            shown = float(placeholder % value)
            # JSON has no NaN or infinity.
            yield name, shown if math.isfinite(shown) else str(shown)
        elif value is None or isinstance(value, int):
            yield name, value
        else:
            yield name, _without_users(str(value) if isinstance(value, str) else placeholder % (value,))


def _without_users(text: str) -> str:
    """Return the text without users, passwords and tokens in URLs."""
    return _USER_OF_URL.sub("***@", text)


def _iso(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("process.failed error=%r", error, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(args: threading.ExceptHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread is not None else None
    exc_info = (args.exc_type, error, args.exc_traceback)
    logging.getLogger(__name__).critical("thread.failed thread=%s error=%r", name, error, exc_info=exc_info)
