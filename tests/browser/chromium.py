"""Debian's Chromium without a screen, driven by its driver."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

__all__ = ["missing", "running_chromium"]

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
"""The console, and what goes over the network."""


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str | None:
    """Return what is not on this machine; None: all is there."""
    if _browser() is None:
        return f"no browser on PATH: {', '.join(BROWSERS)}"
    return None if shutil.which(DRIVER) else f"no {DRIVER} on PATH"


@contextlib.contextmanager
def running_chromium(profile: Path) -> Iterator[Chrome]:
    """Run a browser with a profile of its own."""
    options = ChromeOptions()
    options.binary_location = _browser() or ""
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        # Chromium refuses to be root inside its sandbox.
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", LOGS)
    # The driver's path is given, so that selenium looks for none on the network.
    driver = Chrome(options=options, service=Service(shutil.which(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
