"""Debian's Chromium in headless mode, controlled by chromedriver."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"
ARGUMENTS = (
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    # Containers have little shared memory.
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--no-first-run",
)
LOGS = {"browser": "ALL", "performance": "ALL"}
"""The logs of the browser console and of its network requests."""


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str | None:
    """Return the reason why no browser can start on this machine, or None if one can."""
    if _browser() is None:
        return f"no browser on PATH: {', '.join(BROWSERS)}"
    return None if shutil.which(DRIVER) else f"no {DRIVER} on PATH"


@contextlib.contextmanager
def running_chromium(profile: Path) -> Iterator[Chrome]:
    """Run a browser with a new profile."""
    options = ChromeOptions()
    options.binary_location = _browser() or ""
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        # Chromium does not start its sandbox as root.
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", LOGS)
    # With a given driver path, selenium does not download a driver.
    driver = Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
