"""The history of a request as tables, and lists of requests as a table, as JSON and in a terminal.

A history has two lines for each attempt, and a line for each event. In a terminal, the user opens the trace of a
request of the list.
"""

import argparse
import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

import msgspec
from msgspec.structs import replace
from rich.text import Text

from ....bus import Client
from ....bus.protocol.telemetry.requests import (
    Phases,
    RequestList,
    RequestTrace,
    WorkerTimeline,
    clock_skews,
    phases_of,
    seconds_of,
)
from ....bus.thread_calls import is_set_within
from ....schemas.errors import RollbusError
from ....schemas.telemetry import RequestKind, TimelineEvent
from ...command_json import RequestQuery, answer_of, find_timelines, unknown_request
from ..console import print_json, write
from ..exits import CommandFailed, ExitCode
from ..options import connect
from ..tables import NONE, TableLines, lay_out, printable, wrapped
from .terminal import is_capable, open_screen
from .top import Key, Page

ATTEMPTS = ("attempt", "worker", "phase", "lane", "prompt", "tokens", "versions", "end")
SECONDS = ("attempt", "worker", "queue", "slot", "prefill", "decode", "paused", "tokens/s")
"""Columns of the second table. A single table would be too wide for a terminal of 80 columns."""
EVENTS = ("attempt", "worker", "at", "took", "event", "")
MAX_SHOWN = 16
"""Maximum number of timelines whose events are listed. The timelines of a group then fit on a few screens. --json lists
the events of all timelines."""


def trace_lines(trace: RequestTrace, width: int) -> list[str]:
    """Return the tables of a trace that has a timeline."""
    clients = ", ".join(dict.fromkeys(timeline.client for timeline in trace.timelines))
    models = ", ".join(dict.fromkeys(map(_model, trace.timelines)))
    return [
        *wrapped(f"request {trace.request_id} of client {clients} to {models}", width),
        "",
        *lay_out(ATTEMPTS, list(attempt_rows(trace)), width).lines,
        *("", "seconds in each phase", ""),
        *lay_out(SECONDS, list(phase_rows(trace)), width).lines,
        *("", "seconds since the first event, and since the previous event", ""),
        *lay_out(EVENTS, list(event_rows(trace)), width).lines,
        *(line for note in notes(trace) for line in wrapped(note, width)),
    ]


def attempt_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each timeline: its worker, its size and its end."""
    for timeline in trace.timelines:
        ended, lost = _find(timeline, "ended"), _find(timeline, "lost")
        last = ended or lost
        versions = [event.weight_version for event in timeline.events if event.weight_version is not None]
        yield [
            _label(trace, timeline),
            timeline.worker,
            timeline.phase or "",
            "" if lost else "placed" if timeline.lane is None else timeline.lane,
            "" if lost else f"{timeline.prompt_tokens:,}",
            "" if last is None or last.tokens is None else f"{last.tokens:,}",
            ", ".join(map(str, dict.fromkeys(versions))),
            f"{'lost: ' if lost else ''}{last.reason or ''}" if last else "in flight",
        ]


def phase_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each timeline that a worker reports: its time in each phase."""
    for timeline in trace.timelines:
        if _find(timeline, "lost"):
            continue
        phases = phases_of(timeline)
        seconds = map(_seconds, (phases.queue_s, phases.slot_s, phases.prefill_s, phases.decode_s))
        rate = _rate(_find(timeline, "ended"), phases)
        yield [_label(trace, timeline), timeline.worker, *seconds, _format_pause(phases), rate]


def event_rows(trace: RequestTrace) -> Iterator[list[str]]:
    """Yield a line for each event of the first `MAX_SHOWN` timelines, with the time since the first event of all."""
    began_at = min((event.at for timeline in trace.timelines for event in timeline.events), default=0.0)
    for timeline in trace.timelines[:MAX_SHOWN]:
        before: float | None = None
        for event in timeline.events:
            took = "" if before is None else _seconds(event.at - before)
            at = _seconds(event.at - began_at)
            yield [_label(trace, timeline), timeline.worker, at, took, event.event, _details(event)]
            before = event.at


def notes(trace: RequestTrace) -> Iterator[str]:
    """Yield a line for each limit of the trace: left out timelines, wrong clocks, workers without an answer."""
    if len(trace.timelines) > MAX_SHOWN:
        yield f"The events of {len(trace.timelines) - MAX_SHOWN} more timelines: --json."
    if trace.left_out:
        yield f"{trace.left_out} earlier timelines did not fit into the answers."
    for worker, seconds in clock_skews(trace.timelines).items():
        side = "ahead of" if seconds > 0 else "behind"
        clock = f"The clock of {worker} is at least {abs(seconds):.3f} s {side} the server's"
        yield f"{clock}: compare times across machines with that in mind."
    yield from silent_lines(trace)


def silent_lines(answers: RequestList) -> Iterator[str]:
    """Yield a line for each worker without an answer."""
    for worker, why in answers.silent.items():
        yield f"No answer from {worker}: {why}."


def _label(trace: RequestTrace, timeline: WorkerTimeline) -> str:
    """Return the attempt, with the sample and the client if the trace has several of them."""
    label = str(timeline.number)
    if any(other.child for other in trace.timelines):
        label += f" of sample {timeline.child}"
    if len({other.client for other in trace.timelines}) > 1:
        label += f" of {timeline.client}"
    return label


def _model(timeline: WorkerTimeline) -> str:
    adapter = "" if timeline.lora is None else f" with adapter {timeline.lora}"
    return f"model {timeline.model}{adapter}"


def _find(timeline: WorkerTimeline, name: str) -> TimelineEvent | None:
    return next((event for event in timeline.events if event.event == name), None)


def _details(event: TimelineEvent) -> str:
    parts = []
    if event.weight_version is not None:
        parts.append(f"version {event.weight_version}")
    if event.tokens is not None:
        parts.append(f"{event.tokens:,} tokens")
    if event.cached_tokens is not None:
        parts.append(f"{event.cached_tokens:,} cached")
    if event.reason is not None:
        parts.append(event.reason)
    return ", ".join(parts)


def _format_pause(phases: Phases) -> str:
    if any(pause.seconds is None for pause in phases.pauses):
        return "now"
    return _seconds(sum(pause.seconds or 0.0 for pause in phases.pauses)) if phases.pauses else ""


def _rate(ended: TimelineEvent | None, phases: Phases) -> str:
    if ended is None or not ended.tokens or not phases.decode_s or phases.decode_s <= 0:
        return ""
    return f"{(ended.tokens - 1) / phases.decode_s:,.1f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


COLUMNS: Final = ("state", "request", "seconds", "tokens", "no token for", "worker", "client", "attempt", "model")
_STATES: Final = {
    "published": "arrives",
    "offered": "waits for a slot",
    "started": "prefill",
    "restarted": "prefill",
    "prefilled": "decode",
    "first_token": "decode",
    "resumed": "decode",
    "weights": "decode",
}
"""The state of a request after each event, for people."""
_TITLES: Final = {
    "running": "in flight, the longest time without a token first",
    "slowest": "in flight or ended, the slowest first",
    "failed": "failed, the last first",
    "resumed": "resumed after a loss, the last first",
}


def list_table(found: RequestList, width: int) -> TableLines:
    """Return the table of a list."""
    return lay_out(COLUMNS, list(request_rows(found.timelines)), width)


def request_rows(timelines: Sequence[WorkerTimeline]) -> Iterator[list[str]]:
    """Yield the cells of `COLUMNS` for each request."""
    for timeline in timelines:
        ended, progress, seconds = timeline.events[-1:], timeline.progress, seconds_of(timeline)
        tokens = progress.tokens if progress else ended[0].tokens if ended else None
        sample = f" #{timeline.child}" if timeline.child else ""
        yield [
            state_of(timeline),
            f"{id_of(timeline)}{sample}",
            NONE if seconds is None else f"{seconds:.1f}",
            NONE if tokens is None else f"{tokens:,}",
            f"{progress.idle_s:.1f} s" if progress else NONE,
            timeline.worker,
            timeline.client,
            str(timeline.number) if timeline.number > 1 else NONE,
            timeline.model,
        ]


def state_of(timeline: WorkerTimeline) -> str:
    """Return what a request does now, or how it ended."""
    if not timeline.events:
        return NONE
    last = timeline.events[-1]
    if last.event == "held":
        return f"held by {last.reason or 'a pause'}"
    return last.reason or "ended" if last.event == "ended" else _STATES.get(last.event, last.event)


def id_of(timeline: WorkerTimeline) -> str:
    """Return the id of a request as its caller gave it."""
    return timeline.given_id or timeline.request_id


def list_notes(show: RequestKind, found: RequestList, width: int) -> list[str]:
    """Return the lines above a table: its title, and what it lacks."""
    number = len(found.timelines)
    of = f"{number} of {number + found.left_out}" if found.left_out else f"{number}" if number else "no"
    workers = f"at {found.workers_answered} worker{'s' * (found.workers_answered != 1)}"
    lines = [f"{of} request{'s' * (number != 1)} {workers}: {_TITLES[show]}", *silent_lines(found)]
    return [part for line in lines for part in wrapped(line, width)]


READ_EVERY_S: Final = 1.0
"""Seconds between two reads of the list or trace."""
_LISTS: Final[tuple[RequestKind, ...]] = get_args(RequestKind)
_KEYS: Final = "q quit  up, down  Enter trace  s next list"
_STEPS: Final = {"up": -1, "down": 1, "page_up": -10, "page_down": 10, "home": -10_000, "end": 10_000}


@dataclass(slots=True)
class Browser:
    """What the terminal shows. Reads no terminal and asks no worker."""

    query: RequestQuery
    found: RequestList | None = None
    selected: tuple[object, ...] | None = None
    """Key of the selected request, which stays selected if the order changes."""
    opened: str | None = None
    """Id of the request whose trace is open."""
    trace: RequestTrace | None = None
    problem: str = ""
    page: Page = field(default_factory=Page)
    """The part of the open trace that is scrolled to."""

    def press(self, key: Key) -> bool:
        """Handle a key. Return False if it ends the display."""
        if key == "quit":
            return False
        if self.opened is not None:
            if key == "back":
                self.opened = self.trace = None
            else:
                self.page.press(key)
        elif key == "sort":
            show = _LISTS[(_LISTS.index(self.query.show) + 1) % len(_LISTS)]
            self.query, self.found, self.selected = replace(self.query, show=show), None, None
        elif self.found is not None and self.found.timelines:
            number = self._number()
            if key == "open":
                self.opened, self.page = id_of(self.found.timelines[number]), Page()
            number = min(max(number + _STEPS.get(key, 0), 0), len(self.found.timelines) - 1)
            self.selected = _key(self.found.timelines[number])
        return True

    def draw(self, width: int, height: int) -> Text:
        """Return the text for a terminal of this size."""
        problem = wrapped(self.problem, width) if self.problem else []
        if self.opened is not None:
            lines = [f"request {printable(self.opened)}"] if self.trace is None else trace_lines(self.trace, width)
            return self.page.draw(map(Text, lines), width, height, map(Text, problem))
        if self.found is None:
            return Text("\n").join(map(Text, [*problem, f"{self.query.show}: waiting for the workers"]))
        table, number = list_table(self.found, width), self._number()
        rows = [Text(line, "reverse" if i == number else "") for i, row in enumerate(table.rows) for line in row]
        ends = sum(map(len, table.rows[: number + 1]))
        head = [*problem, *list_notes(self.query.show, self.found, width), "", *([table.head] if table.head else [])]
        room = max(height - len(head) - 1, 1)
        shown = rows[max(ends - room, 0) : max(ends, room)]
        blank = [Text()] * (room - len(shown))
        return Text("\n").join([*map(Text, head), *shown, *blank, Text(_KEYS[:width], "dim")][-height:])

    def _number(self) -> int:
        """Return the position of the selected request in the list, or 0."""
        keys = [_key(each) for each in self.found.timelines] if self.found is not None else []
        return keys.index(self.selected) if self.selected in keys else 0


def _key(timeline: WorkerTimeline) -> tuple[object, ...]:
    return timeline.client, timeline.request_id, timeline.child, timeline.attempt, timeline.worker


async def browse(rb: Client, query: RequestQuery) -> None:
    """Show the list on the terminal until a key or a signal ends it. If a read fails, show the error and continue."""
    browser = Browser(query)
    wanted = asyncio.Event()

    async def read() -> None:
        while True:
            began = time.monotonic()
            wanted.clear()
            await _read(rb, browser)
            screen.wake()
            await is_set_within(wanted, max(began + READ_EVERY_S - time.monotonic(), 0))

    def press_key(key: Key) -> bool:
        before = browser.query, browser.opened
        goes_on = browser.press(key)
        if before != (browser.query, browser.opened):
            wanted.set()
        return goes_on

    with open_screen() as screen:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read(), name="requests.read")
            await screen.show(browser.draw, press_key)
            reading.cancel()


async def _read(rb: Client, browser: Browser) -> None:
    query, opened = browser.query, browser.opened
    try:
        if opened is not None:
            trace = await rb.fleet.timelines(opened, model=query.model)
            if browser.opened == opened and trace.timelines:
                browser.trace = trace
        else:
            found = await query.read(rb.fleet)
            if browser.query == query:
                browser.found = found
        browser.problem = ""
    except RollbusError as exc:
        browser.problem = str(exc)


async def run(args: argparse.Namespace) -> int:
    """Ask the workers and print the history."""
    async with connect(args) as rb:
        trace = await find_timelines(rb.fleet, args.request_id, model=args.model, timeout_s=args.timeout_s)
    if not trace.timelines:
        raise CommandFailed(unknown_request(trace), ExitCode.FAILED if trace.workers_answered else ExitCode.TIMEOUT)
    if args.json:
        print_json(answer_of(trace))
    else:
        write("\n".join(trace_lines(trace, shutil.get_terminal_size().columns)))
    return ExitCode.PARTIAL if trace.silent else ExitCode.OK


async def run_list(args: argparse.Namespace) -> int:
    """Show the list until the user quits, or print it once."""
    query = RequestQuery(args.show, args.client, args.model, args.only_workers, args.limit)
    async with connect(args) as rb:
        if is_capable() and not (args.once or args.json):
            await browse(rb, query)
            return ExitCode.OK
        found = await query.read(rb.fleet)
    if args.json:
        print_json({"show": args.show, **msgspec.to_builtins(found), "silent": list(found.silent)})
    else:
        width = shutil.get_terminal_size().columns
        lines = list_notes(args.show, found, width)
        write("\n".join([*lines, "", *list_table(found, width).lines] if found.timelines else lines))
    return ExitCode.PARTIAL if found.silent else ExitCode.OK
