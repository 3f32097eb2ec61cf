"""Screenshots of the page for the docs, saved only if `$ROLLBUS_SCREENSHOTS` names a folder."""

import base64
import os
from pathlib import Path

from tests.browser.page import Page

FOLDER = os.environ.get("ROLLBUS_SCREENSHOTS")


async def photograph(page: Page, name: str) -> None:
    """Save a screenshot to the file page-`name`.png if a folder is set."""
    if FOLDER:
        picture = await page.command("Page.captureScreenshot", format="png")
        _write(Path(FOLDER, f"page-{name}.png"), picture["data"])


def _write(path: Path, encoded: str) -> None:
    path.write_bytes(base64.b64decode(encoded))
