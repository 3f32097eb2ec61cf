"""One run of `rollbus generate`: sends the requests, shows the progress and writes the results.

The options of the first run are in a file beside the output. A later run of the same output names the options that have
changed, and reads the same commit of a data set.
"""

import asyncio
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from .... import bus
from ....bus import GenerateRequest, Generation, InvalidRequest, NoWorkers, RequestError
from ....bus.client.client import runtime_of
from ....schemas.decoding import nearest
from ....schemas.errors import ErrorCode
from ....schemas.presence import WorkerPresence, WorkerState
from ....schemas.request import check_given_id
from ...tokenization import Tokenizer, TokenizerUnavailable, load_fast_tokenizer, load_tokenizer
from ..console import note
from ..exits import CommandFailed, ExitCode, WrongUsage
from ..tables import printable
from ..watch.status import warn_of_wait
from .inputs import Input
from .results import ResultsFile, error_line, first_error, replacing, result_line
from .rows import Defaults, InputSummary, PromptLine, check_unchanged, parse_prompt


class FirstRun(msgspec.Struct, frozen=True):
    """What the first run of an output was given."""

    options: dict[str, object]
    """Options that affect results, by their names on the command line. Those that were not given are null."""
    revision: str | None = None
    """Commit of the data set."""

    def changes(self, options: Mapping[str, object]) -> str:
        """Return the options that differ now, or an empty string."""
        parts = []
        for name, value in options.items():
            if (first := self.options.get(name)) != value:
                now = f"no {name}" if value is None else f"{name} {value}"
                parts.append(f"{now}, first run {'without' if first is None else first}")
        return ", ".join(parts)


def read_first_run(output: Path) -> FirstRun | None:
    """Return the record of the first run of an output; None if there is none.

    Raises:
        CommandFailed: the record is not readable.
    """
    path = _path(output)
    try:
        return msgspec.json.decode(path.read_bytes(), type=FirstRun)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise WrongUsage(f"{path} is not the record of a run ({exc}); remove it") from None


def write_first_run(output: Path, record: FirstRun) -> None:
    """Write the record of the first run of an output."""
    with replacing(_path(output)) as draft:
        draft.write_bytes(msgspec.json.encode(record) + b"\n")


def _path(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


REFRESH_PER_S: Final = 4
"""Updates per second of the bar, which counts seconds."""
BAR_WIDTH: Final = 20
"""Columns of the bar. The figures fit beside it in 80 columns."""
RATE_S: Final = 10.0
"""Seconds over which the bar measures tokens per second."""


class _PaceColumn(ProgressColumn):
    def __init__(self, pace: Callable[[], str]) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        """Return the pace as text."""
        return Text(self._pace())


class GenerateBar(Progress):
    """One line on stderr that changes in place and disappears at the end. Its methods may be called on any thread.

    Args:
        is_shown: show the bar if stderr is a terminal. False: never show it.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._before = self._tokens = 0
        self._open_tokens: Callable[[], int] | None = None
        self._reason: Callable[[], str] = lambda: ""
        # Times and numbers of tokens.
        self._seen: deque[tuple[float, int]] = deque()
        # Without a total, the bar pulses.
        columns = TextColumn("{task.description}", markup=False), BarColumn(BAR_WIDTH), _PaceColumn(self._pace)
        console, hides = Console(stderr=True, markup=False, highlight=False), not (is_shown and sys.stderr.isatty())
        super().__init__(*columns, console=console, refresh_per_second=REFRESH_PER_S, transient=True, disable=hides)
        self._bar = self.add_task("starting", total=None)

    def show(self, what: str) -> None:
        """Show a step of the run that comes before the generation."""
        self.update(self._bar, description=what, refresh=True)

    def start_count(
        self, total: int | None, before: int, *, open_tokens: Callable[[], int], reason: Callable[[], str]
    ) -> None:
        """Start to count prompts.

        Args:
            total: number of prompts, with those of earlier runs; None: it is unknown.
            before: number of prompts that earlier runs finished.
            open_tokens: returns the number of tokens of the requests in flight. The thread of the bar calls it.
            reason: returns the reason why requests wait, or an empty string. The thread of the bar calls it.
        """
        self._before, self._open_tokens, self._reason = before, open_tokens, reason
        self.reset(self._bar, total=total, completed=before, description="generating")

    def set_counts(self, ended: int, tokens: int) -> None:
        """Set the number of prompts that ended in this run, and the number of their tokens."""
        self._tokens = tokens
        self.update(self._bar, completed=self._before + ended)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the line, and the reason why requests wait."""
        yield from super().get_renderables()
        if reason := self._reason():
            yield Text(printable(reason))

    def _pace(self) -> str:
        task = self.tasks[0]
        seconds, total = task.elapsed or 0.0, None if task.total is None else int(task.total)
        if self._open_tokens is None:
            return f"{seconds:.0f} s"
        rate = self._measure(time.monotonic(), self._tokens + self._open_tokens())
        return pace_text(total, int(task.completed), before=self._before, rate=rate, seconds=seconds)

    def _measure(self, now: float, tokens: int) -> float:
        """Return the tokens per second of the last seconds."""
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(tokens - before, 0) / (now - since) if now > since else 0.0


def count_text(done: int, failed: int, total: int | None) -> str:
    """Return the counts of a run that ends early, and how the user continues it."""
    of = "" if total is None else f" of {total:,}"
    failures = f", {failed:,} failed" if failed else ""
    return f"{done:,}{of} done{failures}; the same command continues"


def pace_text(total: int | None, ended: int, *, before: int, rate: float, seconds: float) -> str:
    """Return finished prompts, tokens per second and time left.

    Args:
        total: number of prompts; None: it is unknown.
        before: number of prompts that earlier runs finished. They do not count for the time left.
        rate: tokens per second.
        seconds: seconds since the start of this run.
    """
    parts = [f"{ended:,}" if total is None else f"{ended:,}/{total:,}"]
    if not rate and ended == before:
        return "  ".join([*parts, f"{seconds:.0f} s"])
    parts.append(f"{rate:,.0f} tokens/s")
    if total is not None and before < ended < total:
        left = round((total - ended) * seconds / (ended - before))
        hours, minutes = left // 3600, left // 60 % 60
        parts.append(f"{hours}:{minutes:02}:{left % 60:02} left" if hours else f"{minutes}:{left % 60:02} left")
    return "  ".join(parts)


@dataclass(slots=True)
class Counts:
    """Counts and times of one run."""

    done: int = 0
    failed: int = 0
    first_error: str | None = None
    """Row and error message of the first request that failed."""
    retryable: int = 0
    """Number of failed requests that may succeed in a retry."""
    models: list[str] = field(default_factory=list)
    """Models that answered, in the order of their first answers."""
    tokens: int = 0
    seconds: float = 0.0
    seconds_to: dict[str, float] = field(default_factory=dict)
    """Seconds until 50, 90, 99 and 100 % of the requests were complete. Empty if no request was sent."""


@dataclass(slots=True, kw_only=True)
class GenerateRun:
    """The run for the prompts of `input` that have no result yet. Memory holds only the requests in flight."""

    input: Input
    defaults: Defaults
    summary: InputSummary
    results: ResultsFile
    max_in_flight: int
    bar: GenerateBar
    record: Path | None = None
    """Directory for the record of the run. None: no record."""
    tokenizer_dir: Path | None = None
    """Folder of the tokenizer. None: for text prompts, the model folder of a worker on this machine."""
    with_prompt: bool = False
    """True if the results have the prompts."""
    changes: str = ""
    """The options that differ from those of the first run."""
    counts: Counts = field(default_factory=Counts)
    _tokenizer: Tokenizer | None = None
    _in_flight: dict[str, PromptLine] = field(default_factory=dict)

    async def run(self, nats_url: str, fleet: str) -> None:
        """Generate a result for each of these prompts.

        Cancellation: the output has all results that were finished.

        Raises:
            CommandFailed: no worker serves, the last worker disappeared, or this user may not send requests. The output
                has all finished results.
        """
        self.bar.show("connecting")
        async with bus.connect(nats_url, fleet=fleet) as rb:
            if self.record is not None:
                rb.record(self.record, experts=self.defaults.fields.get("return_routed_experts") is not False)
            state = await rb.fleet.state()
            await self._check_models(rb, state.workers)
            await warn_of_wait(rb, state, nats_url=nats_url)
            folder = await asyncio.to_thread(self._find_tokenizer, state.workers)
            if folder is not None:
                self._tokenizer = await asyncio.to_thread(self._load_tokenizer, folder)
            await self._generate(rb)

    async def _check_models(self, rb: bus.Client, workers: tuple[WorkerPresence, ...]) -> None:
        """Check the models that options and rows name.

        Raises:
            CommandFailed: a model is unknown, or there are several and a row names none.
        """
        known = {worker.model for worker in workers}
        if not known:
            return
        if not known.issuperset(name for name in self.summary.models if name is not None):
            # A model may wait for its workers.
            known |= set(await rb.fleet.known_models())
        for name, place in self.summary.models.items():
            if name is None and self.results.model is None and len(known) > 1:
                problem = f"{place} names no model"
            elif name is not None and name not in known:
                source = "--model" if self.defaults.fields.get("model") == name else f"{place}: model"
                problem = f"{source} {name}{nearest(name, known)}"
            else:
                continue
            raise WrongUsage(f"{problem}; allowed: {', '.join(sorted(known))}")

    def _load_tokenizer(self, folder: Path) -> Tokenizer:
        self.bar.show("loading the tokenizer")
        tokenizer = load_fast_tokenizer(folder)
        if isinstance(tokenizer, str):
            note(f"loading the tokenizer of {folder} with transformers, which takes seconds: {tokenizer}")
            tokenizer = load_tokenizer(folder)
        if self.summary.needs_template and not tokenizer.wrapped.chat_template:
            raise TokenizerUnavailable(
                f"the prompts are messages, and the tokenizer in {folder} has no chat template; name one with "
                "--tokenizer DIR"
            )
        return tokenizer

    def count_text(self) -> str:
        """Return the counts of this run and of earlier runs, and how the user continues it."""
        done = len(self.results.finished) + self.counts.done
        return count_text(done, self.counts.failed, self.summary.num_prompts)

    @property
    def num_ended(self) -> int:
        """Number of prompts that have ended in this run or an earlier one."""
        return len(self.results.finished) + self.counts.done + self.counts.failed

    @property
    def num_left(self) -> int:
        """Number of prompts without a result; 0 if it is unknown."""
        return max((self.summary.num_prompts or 0) - self.num_ended, 0)

    async def _generate(self, rb: bus.Client) -> None:
        started = time.monotonic()
        times = bus.BatchTimes()
        # The bar may ask them after the client was closed.
        calls, fleet = runtime_of(rb).coordinator, rb.fleet
        self.bar.start_count(
            self.summary.num_prompts,
            len(self.results.finished),
            open_tokens=lambda: calls.num_tokens,
            reason=lambda: wait_reason(fleet.workers),
        )
        try:
            async for generation in rb.complete_many(self._requests(), max_in_flight=self.max_in_flight, times=times):
                self._add_generation(generation)
                self.counts.seconds = round(time.monotonic() - started, 3)
        except NoWorkers as exc:
            raise CommandFailed(f"{exc.message}; {self.count_text()}", ExitCode.NO_WORKERS) from exc
        self.counts.seconds_to = {str(percent): round(seconds, 3) for percent, seconds in times.percentiles().items()}

    def _requests(self) -> Iterator[GenerateRequest]:
        finished = self.results.finished
        for index, row in self.input.rows():
            if index in finished and not self.input.is_stream:
                continue
            prompt = PromptLine(index, f"input-{index}", "", None, {})
            try:
                prompt = parse_prompt(index, row, self.defaults)
                if index in finished:
                    check_unchanged(self.input, prompt, finished, self.changes)
                    continue
                request = prompt.request(self._tokenizer, self._choose_id(prompt))
            except InvalidRequest as exc:
                self._add_error(prompt, exc)
                continue
            if request.model is None and self.results.model is not None:
                # The model that began the output completes it.
                request = replace(request, model=self.results.model)
            self._in_flight[request.request_id] = prompt
            yield request

    def _choose_id(self, prompt: PromptLine) -> str:
        """Return the id of the row, or another one if a request in flight has it or the wire cannot carry it."""
        try:
            request_id = check_given_id("request_id", prompt.request_id)
        except InvalidRequest:
            request_id = f"input-{prompt.index}"
        return uuid.uuid4().hex if request_id in self._in_flight else request_id

    def _add_generation(self, generation: Generation) -> None:
        prompt = self._in_flight.pop(generation.request_id)
        error = first_error(generation)
        if error is not None:
            if error.code is ErrorCode.PERMISSION_DENIED:
                # This user may send no request at all, so the other rows need no result of their own.
                raise CommandFailed(error.message) from error
            self._add_error(prompt, error)
            return
        self.results.append(
            result_line(prompt, generation, self._tokenizer, self.results.rows, with_prompt=self.with_prompt)
        )
        self.counts.done += 1
        if generation.model is not None and generation.model not in self.counts.models:
            self.counts.models.append(generation.model)
        self.counts.tokens += sum(len(sample.token_ids) for sample in (generation, *generation.siblings))
        self._show_counts()

    def _add_error(self, prompt: PromptLine, error: RequestError) -> None:
        self.results.append(error_line(prompt, error))
        self.counts.failed += 1
        self.counts.retryable += error.retryable
        self.counts.first_error = self.counts.first_error or f"{self.input.unit} {prompt.index + 1}: {error.message}"
        self._show_counts()

    def _show_counts(self) -> None:
        self.bar.set_counts(self.counts.done + self.counts.failed, self.counts.tokens)

    def _find_tokenizer(self, workers: tuple[WorkerPresence, ...]) -> Path | None:
        """Return the tokenizer folder that the user chose, or the model folder of the workers on this machine.

        Return None if the input has no text prompts and the user chose no folder.
        """
        if self.tokenizer_dir is not None or not self.summary.needs_tokenizer:
            return self.tokenizer_dir
        model = self.defaults.fields.get("model") or self.results.model
        paths = {Path(worker.model_path) for worker in workers if worker.model_path and model in (None, worker.model)}
        folders = [path for path in paths if path.is_dir()]
        if len(folders) != 1:
            found = "more than one model" if folders else "no model"
            raise WrongUsage(
                f"the input has text prompts, but the workers serve {found} from a folder on this machine; name the "
                "folder of the model or of its tokenizer with --tokenizer DIR"
            )
        return folders[0]


def wait_reason(workers: tuple[WorkerPresence, ...]) -> str:
    """Return the reason why requests wait, or an empty string if a worker serves."""
    if any(worker.state is WorkerState.SERVING for worker in workers):
        return ""
    states = []
    for worker in workers:
        state = "starts" if worker.state is WorkerState.STARTING else f"is {worker.state}"
        states.append(f"{worker.worker} {state}, {worker.uptime_s:.0f} s")
    return f"the requests wait: {', '.join(states) or 'no worker is live'}"
