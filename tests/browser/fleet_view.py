"""The content of the fleet view of the page."""

from tests.browser.page import Page

ROWS = """
const cells = row => [...row.querySelectorAll("td[data-column]")].map(td => [td.dataset.column, td.innerText.trim()]);
return [...document.querySelectorAll("[data-testid=workers] tbody tr[data-key]")]
    .map(row => ({worker: row.dataset.key, ...Object.fromEntries(cells(row))}));
"""
"""The rows of the workers table that exist as elements now: the text of each cell by its column."""


async def rows(page: Page) -> dict[str, dict[str, str]]:
    """Return the rows of the workers table that exist as elements now, by worker."""
    return {row["worker"]: row for row in await page.run(ROWS)}
