"""Output of `rollbus top` where lines cannot change in place: the same tables once, or JSON."""

from typing import Any

from msgspec.structs import replace

from ....bus.protocol.telemetry.fleet_rates import Rates
from ..console import write
from ..fleet_tables import state_as_json
from ..tables import print_table
from .options import TopOptions
from .screen import TopView, heading
from .sections import Section, sections
from .workers_table import COLUMNS, sorted_workers, worker_cells

__all__ = ["print_top", "top_as_json"]


def print_top(view: TopView, options: TopOptions) -> None:
    """Print all workers with all columns, and the other tables, on stdout."""
    write("\n".join(heading(view, options)))
    workers = sorted_workers(view.state.workers, view.rates, options.sort, options.model)
    workers_table = Section(COLUMNS, [worker_cells(worker, view.rates.of(worker.worker)) for worker in workers])
    for columns, cells, _ in (workers_table, *sections(view.state, view.rates, options.model)):
        write()
        print_table(columns, cells)


def top_as_json(view: TopView, options: TopOptions) -> dict[str, Any]:
    """Return the JSON of `rollbus status --json` with the rates of the fleet, the models and the workers.

    With `options.model`, all but the rates of the fleet is of this model.
    """
    rates, state = view.rates, view.state
    workers = sorted_workers(state.workers, rates, options.sort, options.model)

    def shows(model: str) -> bool:
        return options.model in (None, model)

    shown = replace(
        state,
        workers=tuple(workers),
        queues=tuple(depth for depth in state.queues if shows(depth.model)),
        queue_problems={model: problem for model, problem in state.queue_problems.items() if shows(model)},
        desired={model: desired for model, desired in state.desired.items() if shows(model)},
    )
    return state_as_json(shown) | {
        "rates": {
            "fleet": _as_json(rates.of_fleet()),
            "models": {model: _as_json(each) for model, each in rates.of_models().items() if shows(model)},
            "workers": {worker.worker: _as_json(rates.of(worker.worker)) for worker in workers},
        }
    }


def _as_json(rates: Rates) -> dict[str, float | None]:
    names = ("tokens_per_s", "requests_per_s", "first_token_s", "between_tokens_s", "prefix_hit")
    return {name: getattr(rates, name) for name in names}
