"""The tables of docs/scaling.md: the measurements of `bench.scale`, and the figures computed from them.

python -m bench.scale --json bench/results/scale.json
python -m bench.scale_paper

The table on new weights, with and without deltas, is computed, not measured.
"""

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.paper import markdown, median
from rollbus.bus.protocol.stream.chunk_writer import SEGMENT_BYTES, ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import LinkMessage, RequestKey
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.rows import DTYPES, dtype_for

Row = Mapping[str, Any]
COLORS = {"worker": "#1f77b4", "client": "#d95f02", "server": "#4d4d4d"}


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw the rows of fleets and backlogs as SVG. Equal rows give equal bytes."""
    mpl.rcParams.update({"svg.hashsalt": "rollbus", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9})
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 3)
    shapes = _shapes(rows)
    top = 1.1 * max((number(row[f"{side}_ms"]) for row in rows if row["part"] == "fleet" for side in COLORS), default=1)
    for place, (shape, members) in zip(axes[0], shapes.items(), strict=True):
        place.set_title(f"the same load, more {shape}")
        for side, color in COLORS.items():
            place.plot(_sizes(members), [number(row[f"{side}_ms"]) for row in members], ".-", color=color, label=side)
        _finish(place, shape, "CPU ms a request", top)
        place.legend()
    idle, cpu, memory = axes[1]
    idle.set_title("a fleet with nothing to do")
    for (shape, members), line in zip(shapes.items(), ("-", "--", ":"), strict=True):
        values = [sum(number(row[f"{side}_idle"]) for side in COLORS) for row in members]
        idle.plot(_sizes(members), values, line, color="black", marker=".", label=f"more {shape}")
    idle.legend()
    _finish(idle, "workers, clients, or each", "CPU ms a second, all sides")
    cpu.set_title("a backlog")
    _slices(cpu, rows, "ms", "CPU ms a request")
    memory.set_title("memory meanwhile")
    _slices(memory, rows, "mb", "MB")
    figure.savefig(file, format="svg", metadata={"Date": None})


def _shapes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of the fleets by the side that grows."""
    fleets = [row for row in rows if row["part"] == "fleet"]
    return {
        "workers": [row for row in fleets if row["clients"] == 1],
        "clients": [row for row in fleets if row["workers"] == 1],
        "workers and clients": [row for row in fleets if row["workers"] == row["clients"]],
    }


def _sizes(fleets: Sequence[Row]) -> list[float]:
    return [max(number(row["workers"]), number(row["clients"])) for row in fleets]


def _slices(axes: Axes, rows: Sequence[Row], figure: str, label: str) -> None:
    """Draw the parts of the backlog one after the other on one axis."""
    first = 0.0
    for part in ("queueing", "draining", "passing"):
        members = [row for row in rows if row["part"] == part]
        if not members:
            continue
        places = [first + number(row["at"]) for row in members]
        for side, color in COLORS.items():
            values = [number(row[f"{side}_{figure}"]) for row in members]
            axes.plot(places, values, ".-", color=color, label=side if first == 0 else None)
        axes.annotate(part, ((first + places[-1]) / 2, 0.93), xycoords=("data", "axes fraction"), ha="center")
        first = places[-1]
        axes.axvline(first, color="#cccccc", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:.0f}k")
    _finish(axes, "requests", label, top=1.15 * axes.get_ylim()[1])


def _finish(axes: Axes, x: str, y: str, top: float | None = None) -> None:
    if x != "requests":
        axes.set_xscale("log", base=4)
        axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axes.minorticks_off()
    axes.set_ylim(0, top)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def number(value: Any) -> float:
    """Return a figure as one number: the median of a spread."""
    return float(median(value))


DELTA_SHARE: Final = 0.025
"""Share of a checkpoint in bfloat16 that a delta has, for a step at a learning rate of 3e-6. docs/performance.md lists
the shares by step."""
WORKERS_PER_MACHINE: Final = 4
SERVER_BYTES_PER_S: Final = 1e9
"""Bytes per second that one server sends."""
UPLOAD_BYTES_PER_S: Final = 0.5e9
"""Bytes per second that one process uploads into the store."""
COMPARE_BYTES_PER_S: Final = 1e9
"""Bytes per second that one core of the trainer compares and encodes."""
BUILD_BYTES_PER_S: Final = 0.5e9
"""Bytes per second at which a machine builds a folder from the previous one.

It reads, changes, hashes and writes the whole checkpoint.
"""


CASES: Final = (("0.6B", 1.19e9, 64), ("30B-A3B", 61.1e9, 64), ("30B-A3B", 61.1e9, 1000))
"""Models, bytes of their weights, and numbers of workers."""


def weights_table() -> str:
    """Return the computed cost of new weights, with a column for each model and fleet."""
    columns = []
    for _, full, workers in CASES:
        machines, delta = workers / WORKERS_PER_MACHINE, full * DELTA_SHARE
        columns.append(
            {
                "machines": f"{machines:,.0f}",
                "whole, once for each machine: the server sends": _bytes(machines * full),
                "time for that": _time(machines * full / SERVER_BYTES_PER_S),
                "upload of the whole checkpoint by the trainer": _time(full / UPLOAD_BYTES_PER_S),
                "**delta, once for each machine: the server sends**": f"**{_bytes(machines * delta)}**",
                "**time for that**": f"**{_time(machines * delta / SERVER_BYTES_PER_S)}**",
                "comparison by the trainer, on one core": _time(full / COMPARE_BYTES_PER_S),
                "build of the folder on each machine": _time(full / BUILD_BYTES_PER_S),
            }
        )
    return _by_name(["one version", *(f"{model}, {workers:,} workers" for model, _, workers in CASES)], columns)


def _by_name(head: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """Return a table whose rows are the figures of the columns."""
    return markdown(head, [[name, *(column[name] for column in columns)] for name in columns[0]])


def _bytes(count: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("MB", 1e6), ("GB", 1e9)) if count < 1000 * size), ("TB", 1e12))
    return f"{count / size:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


ROOT: Final = Path(__file__).resolve().parent.parent
DOC: Final = ROOT / "docs" / "scaling.md"
FIGURE: Final = ROOT / "docs" / "img" / "scale.svg"
RESULTS: Final = ROOT / "bench" / "results" / "scale.json"

NUM_WORKERS: Final = 1000
PROMPT_TOKENS: Final = 2048
GENERATED_TOKENS: Final = 8192
SHARE: Final = 0.5
"""The planned share of the capacity of a server or a client."""
MAX_FRAME_BYTES: Final = 512 * 1024


@dataclass(frozen=True, slots=True)
class Model:
    """A model, and the speed of one worker with it."""

    name: str
    num_layers: int
    top_k: int
    num_experts: int
    in_flight: int
    steps_per_s: int

    @property
    def tokens_per_s(self) -> int:
        """Tokens per second of one worker."""
        return self.in_flight * self.steps_per_s

    @property
    def id_bytes(self) -> int:
        """Bytes of an expert id."""
        return DTYPES[dtype_for(self.num_experts)].itemsize

    @property
    def row_shape(self) -> str:
        """The factors of `row_bytes`: layers, top-k and bytes of an expert id."""
        return f"{self.num_layers} × {self.top_k} × {self.id_bytes}"

    @property
    def row_bytes(self) -> int:
        """Bytes of the routed experts of one token."""
        return self.num_layers * self.top_k * self.id_bytes


MODELS: Final = (Model("30B-A3B", 48, 8, 128, 256, 40), Model("1T-A32B", 61, 8, 384, 256, 20))


def frame_bytes(model: Model, *, routed: bool = True) -> int:
    """Return the bytes of the frames of one step for one client; each request in flight gets one token."""
    sender = LinkSender(incarnation="w" * 8, link=0, client_incarnation="c" * 12, max_frame_bytes=MAX_FRAME_BYTES)
    sender.receive(
        LinkMessage(WIRE_VERSION, [], client_incarnation="c" * 12, incarnation="w" * 8, link=0, acked=0, credit=2**40)
    )
    dtype = dtype_for(model.num_experts)
    routing = RoutedExpertsInfo(
        num_layers=model.num_layers, top_k=model.top_k, num_experts=model.num_experts, dtype=dtype
    )
    keys = [RequestKey(uuid.UUID(int=i).hex) for i in range(model.in_flight)]
    for key in keys:
        writer = ChunkWriter(
            key, prompt_len=1, routing=routing if routed else None, start=0, segment_bytes=SEGMENT_BYTES
        )
        sender.open(key, writer)
    size = 0
    # The second step: the first also offers the requests.
    for position in (0, 1):
        size = 0
        for key in keys:
            sender.encode_step(key, _step(model, position, routed=routed), 100)
        while (data := sender.seal()) is not None:
            size += len(data)
    return size


def _step(model: Model, position: int, *, routed: bool) -> RequestStep:
    rows = np.zeros((1, model.num_layers, model.top_k), DTYPES[dtype_for(model.num_experts)])
    return RequestStep(
        key="",
        token_ids=np.array([100_000], np.int32),
        logprobs=np.array([-1.25], np.float32),
        routed_experts=rows if routed else None,
        routed_experts_start=position,
    )


# Tables

Rows = Sequence[Mapping[str, Any]]


def load_table() -> str:
    """Return the computed load of a thousand workers."""
    columns = []
    for model in MODELS:
        frame, bare = frame_bytes(model), frame_bytes(model, routed=False)
        tokens = NUM_WORKERS * model.tokens_per_s
        requests = tokens / GENERATED_TOKENS
        columns.append(
            {
                "one worker: requests in flight": f"{model.in_flight:,}",
                "steps per second": f"{model.steps_per_s:,}",
                "tokens per second": f"{model.tokens_per_s:,}",
                "routed experts of a token": f"{model.row_shape} = {model.row_bytes} B",
                "a token on the wire, without routed experts": f"{bare / model.in_flight:.0f} B",
                "with routed experts": f"{frame / model.in_flight:,.0f} B",
                "**1,000 workers: tokens per second**": f"{tokens / 1e6:.2f} million",
                "frames per second, with one client per worker": f"{NUM_WORKERS * model.steps_per_s:,}",
                "frames, without routed experts": f"{NUM_WORKERS * model.steps_per_s * bare / 1e9:.2f} GB/s",
                "**frames, with routed experts**": f"**{stream_bytes(model) / 1e9:.2f} GB/s**",
                "routed experts of prompts": f"{prompt_bytes(model) / 1e9:.2f} GB/s",
                "requests per second": f"{requests:,.0f}",
            }
        )
    return _by_name(["", *(model.name for model in MODELS)], columns)


def stream_bytes(model: Model) -> float:
    """Return the bytes per second of all workers, with routed experts."""
    return NUM_WORKERS * model.steps_per_s * frame_bytes(model)


def prompt_bytes(model: Model) -> float:
    """Return the bytes per second of the routed experts of prompts, of all workers."""
    return NUM_WORKERS * model.tokens_per_s / GENERATED_TOKENS * PROMPT_TOKENS * model.row_bytes


def need_table(rows: Rows) -> str:
    """Return the servers and clients that carry this load."""
    lines: list[list[str]] = []
    for model in MODELS:
        num_bytes, tokens = stream_bytes(model) + prompt_bytes(model), NUM_WORKERS * model.tokens_per_s
        costs = {side: number(row[f"{side}_ms"]) for row in rows if row["part"] == model.name for side in SIDES}
        servers = math.ceil(num_bytes / SERVER_BYTES_PER_S / SHARE)
        clients = math.ceil(tokens * costs["client"] / 1e6 / SHARE)
        lines.append(
            [
                model.name,
                f"{num_bytes / 1e9:.1f} GB/s",
                f"{servers}",
                f"{NUM_WORKERS // servers}",
                f"{clients}",
                f"{NUM_WORKERS // clients}",
                f"{100 * model.tokens_per_s * costs['worker'] / 1e6:.0f} %",
            ]
        )
    head = ["1,000 workers", "bytes", "servers", "workers per server", "clients", "workers per client"]
    return markdown([*head, "share of a core at each worker"], lines)


SIDES: Final = ("worker", "client", "server")


def model_table(rows: Rows) -> str:
    """Return the cost of a token."""
    head = ["routed experts", *(f"{side}, µs per token" for side in SIDES), "tokens/s of a client's core"]
    lines = []
    for row in rows:
        if row["part"] in {"no routing", *(model.name for model in MODELS)}:
            costs = {side: number(row[f"{side}_ms"]) for side in SIDES}
            lines.append(
                [
                    "none" if row["part"] == "no routing" else row["part"],
                    *map(_figure, costs.values()),
                    f"{1e6 / costs['client']:,.0f}",
                ]
            )
    return markdown(head, lines)


def _figure(value: float) -> str:
    return f"{value:,.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def with_tables(text: str, report: Mapping[str, Any]) -> str:
    """Return the page with all its tables regenerated."""
    rows = report["rows"]
    tables = {
        "measured": f"`{report['command']}`, {report['machine']}",
        "load": load_table(),
        "need": need_table(rows),
        "weights": weights_table(),
        "models": model_table(rows),
    }
    for name, table in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def main() -> None:
    """Write the page and the figure."""
    report = json.loads(RESULTS.read_text())
    DOC.write_text(with_tables(DOC.read_text(), report))
    plot(report["rows"], FIGURE)


if __name__ == "__main__":
    main()
