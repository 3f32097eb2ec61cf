"""The experts view of the page, and the expected counts: those of the rows that a client received."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from selenium.webdriver.common.keys import Keys

import rollbus
from tests.browser.page import Page

Counts = npt.NDArray[np.int64]
CELL = "const {layer, expert, count} = document.querySelector('[data-testid=cell-readout]').dataset;"
READOUT = f"{CELL} return [Number(layer), Number(expert), Number(count)];"
TOTAL = "return Number(document.querySelector('[data-testid=cell-readout]')?.dataset.total)"


def counts_of(generations: Iterable[rollbus.Generation], num_experts: int) -> dict[str, Counts]:
    """Count the choices in rows that start at position 0, by plane: i8[num_layers, num_experts]."""
    prompts, answers = [], []
    for generation in generations:
        rows = generation.routed_experts
        # The last token was sampled, but the engine computed no row for it.
        prompt_len = len(rows) - (len(generation.token_ids) - 1)
        prompts.append(rows[:prompt_len])
        answers.append(rows[prompt_len:])
    return {
        name: _counts(np.concatenate(parts), num_experts)
        for name, parts in (("prompt", prompts), ("generated", answers))
    }


def _counts(rows: npt.NDArray[np.integer], num_experts: int) -> Counts:
    return np.stack([np.bincount(rows[:, layer].ravel(), minlength=num_experts) for layer in range(rows.shape[1])])


async def until_counts(page: Page, plane: str, expected: Counts) -> None:
    """Wait until a plane shows the expected number of choices, then read each cell with the arrow keys."""
    await page.click(f"label:has([data-testid=plane-{plane}])")
    # All layers have the same number of choices.
    await page.until(TOTAL, int(expected[0].sum()))
    await page.run("document.querySelector('[data-testid=heatmap]').focus()")
    num_layers, num_experts = expected.shape
    await page.press(Keys.PAGE_UP, Keys.HOME)
    shown = np.full_like(expected, -1)
    for layer in range(num_layers):
        for _ in range(num_experts):
            at, expert, count = await page.run(READOUT)
            assert at == layer
            shown[at, expert] = count
            await page.press(Keys.RIGHT)
        await page.press(Keys.HOME, Keys.DOWN)
    assert np.array_equal(shown, expected), (shown.tolist(), expected.tolist())
