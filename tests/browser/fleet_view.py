"""What the page's view of the fleet shows."""

from tests.browser.page import Page

__all__ = ["ROWS", "rows"]

ROWS = """
const cells = row => [...row.querySelectorAll("td[data-column]")].map(td => [td.dataset.column, td.innerText.trim()]);
return [...document.querySelectorAll("[data-testid=workers] tbody tr[data-key]")]
    .map(row => ({worker: row.dataset.key, ...Object.fromEntries(cells(row))}));
"""
"""The rows of the table of workers that are elements now: the text of each cell by its column."""


async def rows(page: Page) -> dict[str, dict[str, str]]:
    """The rows of the table of workers that are elements now, by worker."""
    return {row["worker"]: row for row in await page.run(ROWS)}
