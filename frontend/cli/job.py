"""One run of `rollbus generate`: sends the requests and writes their results."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ... import bus
from ...bus import GenerateRequest, Generation, InvalidRequest, NoWorkers, RequestError
from ...schemas.presence import WorkerPresence
from ..tokenization import Tokenizer, load_tokenizer
from .exits import CommandFailed, ExitCode
from .generate_bar import GenerateBar, count_text
from .prompts import Defaults, InputSummary, PromptLine, read_prompts
from .results import ResultsFile, error_line, first_error, result_line
from .serving import warn_of_wait

__all__ = ["Counts", "GenerateRun"]


@dataclass(slots=True)
class Counts:
    """Counts and times of one run."""

    done: int = 0
    failed: int = 0
    first_error: str | None = None
    """Line and error message of the first request that failed."""
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

    input: Path
    defaults: Defaults
    summary: InputSummary
    results: ResultsFile
    max_in_flight: int
    bar: GenerateBar
    tokenizer_dir: Path | None = None
    """Folder of the tokenizer. None: for text prompts, the model folder of a worker on this machine."""
    counts: Counts = field(default_factory=Counts)
    _tokenizer: Tokenizer | None = None
    _in_flight: dict[str, PromptLine] = field(default_factory=dict)

    async def run(self, nats_url: str, fleet: str) -> int:
        """Generate a result for each of these prompts.

        Cancellation: the output has all results that were finished.

        Raises:
            CommandFailed: no worker serves, or the last worker disappeared. The output has all finished results.
        """
        self.bar.show("connecting")
        async with bus.connect(nats_url, fleet=fleet) as rb:
            state = await rb.fleet.state()
            await warn_of_wait(rb, state, nats_url=nats_url)
            folder = await asyncio.to_thread(self._find_tokenizer, state.workers)
            if folder is not None:
                self.bar.show("loading the tokenizer")
                self._tokenizer = await asyncio.to_thread(load_tokenizer, folder)
            await self._generate(rb)
        return ExitCode.OK

    def count_text(self) -> str:
        """Return the counts of this run and of earlier runs, and how the user continues it."""
        done = len(self.results.finished) + self.counts.done
        return count_text(done, self.counts.failed, self.summary.num_prompts)

    async def _generate(self, rb: bus.Client) -> None:
        started = time.monotonic()
        times = bus.BatchTimes()
        self.bar.start_count(self.summary.num_prompts, len(self.results.finished))
        try:
            async for generation in rb.complete_many(self._requests(), max_in_flight=self.max_in_flight, times=times):
                self._add_generation(generation)
                self.counts.seconds = round(time.monotonic() - started, 3)
        except NoWorkers as exc:
            raise CommandFailed(f"{exc.message}; {self.count_text()}", ExitCode.NO_WORKERS) from exc
        self.counts.seconds_to = {str(percent): round(seconds, 3) for percent, seconds in times.percentiles().items()}

    def _requests(self) -> Iterator[GenerateRequest]:
        for prompt in read_prompts(self.input, self.defaults, skip=self.results.finished):
            try:
                request = prompt.request(self._tokenizer)
            except InvalidRequest as exc:
                self._add_error(prompt, exc)
                continue
            if request.model is None and self.results.model is not None:
                # The model that began the output completes it.
                request = replace(request, model=self.results.model)
            self._in_flight[prompt.request_id] = prompt
            yield request

    def _add_generation(self, generation: Generation) -> None:
        prompt = self._in_flight.pop(generation.request_id)
        error = first_error(generation)
        if error is not None:
            self._add_error(prompt, error)
            return
        self.results.append(result_line(prompt, generation, self._tokenizer, self.results.rows))
        self.counts.done += 1
        if generation.model is not None and generation.model not in self.counts.models:
            self.counts.models.append(generation.model)
        self.counts.tokens += sum(len(sample.token_ids) for sample in (generation, *generation.siblings))
        self._show_counts()

    def _add_error(self, prompt: PromptLine, error: RequestError) -> None:
        self.results.append(error_line(prompt, error))
        self.counts.failed += 1
        self.counts.retryable += error.retryable
        self.counts.first_error = self.counts.first_error or f"line {prompt.index + 1}: {error.message}"
        self._show_counts()

    def _show_counts(self) -> None:
        self.bar.set_counts(self.counts.done + self.counts.failed, self.counts.tokens)

    def _find_tokenizer(self, workers: tuple[WorkerPresence, ...]) -> Path | None:
        """Return the tokenizer folder that the user chose, or the model folder of the workers on this machine.

        Return None if the input has no text prompts and the user chose no folder.
        """
        if self.tokenizer_dir is not None or not self.summary.has_text:
            return self.tokenizer_dir
        model = self.defaults.fields.get("model")
        paths = {Path(worker.model_path) for worker in workers if worker.model_path and model in (None, worker.model)}
        folders = [path for path in paths if path.is_dir()]
        if len(folders) != 1:
            found = "more than one model" if folders else "no model"
            raise CommandFailed(
                f"the input has text prompts, but the workers serve {found} from a folder on this machine; name the "
                "folder of the model or of its tokenizer with --tokenizer DIR",
                ExitCode.USAGE,
            )
        return folders[0]
