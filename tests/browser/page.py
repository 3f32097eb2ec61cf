"""A page in the browser: its content, user input, and the complaints of the browser."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.support.waits import SOON_S

T = TypeVar("T")
Theme = Literal["light", "dark"]
LOOK_AGAIN_S = 0.1
FAILED_REQUEST = "network"
"""The source of console messages about a request that failed or whose response has a status from 400 on."""


def each(selector: str, expression: str) -> str:
    """Return a script that evaluates the expression for each matching element `one` and returns a list."""
    return f"return [...document.querySelectorAll({json.dumps(selector)})].map(one => {expression})"


@dataclass(frozen=True)
class Size:
    """The size of a screen in CSS pixels."""

    width: int
    height: int
    is_mobile: bool = False


DESKTOP = Size(1400, 900)
PHONE = Size(390, 844, is_mobile=True)


@dataclass
class Page:
    """An open page. Call `opened` to open one."""

    driver: Chrome
    origin: str
    complaints: list[str] = field(default_factory=list)
    """Console messages of level warning and above."""
    urls: list[str] = field(default_factory=list)
    """The URLs of all requests of this page."""
    may_fail: bool = False
    """True if requests may fail or be refused."""

    async def _do(self, act: Callable[[], T]) -> T:
        # The driver's calls block, and the service runs in this process.
        return await asyncio.to_thread(act)

    async def run(self, script: str, *arguments: object) -> Any:
        """Return the result of a function with this body that runs in the page."""
        return await self._do(lambda: self.driver.execute_script(script, *arguments))

    async def command(self, name: str, **parameters: object) -> Any:
        """Return the result of a command of the Chrome DevTools Protocol."""
        return await self._do(lambda: self.driver.execute_cdp_cmd(name, parameters))

    async def until(self, script: str, expected: object = True, *arguments: object) -> Any:
        """Poll until `script` returns `expected`, or until `expected` accepts its result if `expected` is callable."""
        seen: object = None

        def is_met() -> bool:
            return bool(expected(seen)) if callable(expected) else seen == expected

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                while True:
                    seen = await self.run(script, *arguments)
                    if is_met():
                        return seen
                    await asyncio.sleep(LOOK_AGAIN_S)
        shown = await self.run("return document.body.innerText")
        raise AssertionError(f"{script}\nis {seen!r}\nand not {expected!r}; the page shows\n{shown[:4000]}")

    async def until_text(self, selector: str, expected: object) -> Any:
        """Wait until the visible text of the first matching element is `expected`. The text is None without an element.

        `expected` may also be a callable that accepts the text.
        """
        return await self.until("return document.querySelector(arguments[0])?.innerText", expected, selector)

    async def texts(self, selector: str) -> list[str]:
        """Return the visible text of each matching element."""
        found: list[str] = await self.run(each(selector, "one.innerText"))
        return found

    async def click(self, selector: str) -> None:
        """Click an element as soon as it is visible. The click fails if another element covers it."""
        await self.until("return document.querySelector(arguments[0])?.checkVisibility() ?? false", True, selector)
        await self._do(lambda: self.driver.find_element(By.CSS_SELECTOR, selector).click())

    async def press(self, *keys: str) -> None:
        """Press keys one after the other. The element with the focus receives them."""
        await self._do(lambda: ActionChains(self.driver).send_keys(*keys).perform())

    async def resize(self, size: Size) -> None:
        """Emulate another screen size."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=size.width,
            height=size.height,
            mobile=size.is_mobile,
            deviceScaleFactor=2 if size.is_mobile else 1,
        )

    async def like(self, theme: Theme) -> None:
        """Emulate a user preference for light or dark pages."""
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def goto(self, address: str) -> None:
        """Load an address and collect the browser's log entries so far."""
        await self._do(lambda: self.driver.get(address))
        await self.listen()

    async def listen(self) -> None:
        """Collect the new entries of the browser's logs."""
        for entry in await self._do(lambda: self._log("browser")):
            if entry["level"] in ("SEVERE", "WARNING") and not (self.may_fail and entry["source"] == FAILED_REQUEST):
                self.complaints.append(f"{entry['source']}: {entry['message']}")
        for entry in await self._do(lambda: self._log("performance")):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent" and event["params"]["documentURL"] != BLANK:
                self.urls.append(event["params"]["request"]["url"])

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))

    @property
    def strangers(self) -> list[str]:
        """URLs of the page's requests to other origins than the service."""
        return [url for url in self.urls if not url.startswith((f"{self.origin}/", "data:"))]

    async def rows(self) -> dict[str, dict[str, str]]:
        """Return the rows of the workers table that exist as elements now: by worker, the text of each column."""
        return {row["worker"]: row for row in await self.run(ROWS)}


ROWS = """
const cells = row => [...row.querySelectorAll("td[data-column]")].map(td => [td.dataset.column, td.innerText.trim()]);
return [...document.querySelectorAll("[data-testid=workers] tbody tr[data-key]")]
    .map(row => ({worker: row.dataset.key, ...Object.fromEntries(cells(row))}));
"""


BLANK = "about:blank"


@contextlib.asynccontextmanager
async def opened(
    driver: Chrome, address: str, *, size: Size = DESKTOP, theme: Theme = "light", may_fail: bool = False
) -> AsyncIterator[Page]:
    """Open an address, and verify at the end that the console is clean and that no request left the origin.

    Args:
        may_fail: the test makes requests fail, so the console may report failed requests.
    """
    page = Page(driver, "{0.scheme}://{0.netloc}".format(urlsplit(address)), may_fail=may_fail)
    await page.goto(BLANK)
    page.complaints, page.urls = [], []
    await page.resize(size)
    await page.like(theme)
    try:
        await page.goto(address)
        yield page
        await page.listen()
    finally:
        # A blank page closes its streams before the service stops.
        await page.goto(BLANK)
    # The assertions need messages: pytest explains only assertions in test modules.
    assert page.complaints == [], page.complaints
    assert page.strangers == [], page.strangers


# Debian's Chromium in headless mode, controlled by chromedriver.


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


# Accessibility checks of the page: names, roles and text contrast.


NAMED = {
    *("button", "checkbox", "combobox", "dialog", "grid", "heading", "image", "link", "listbox", "menuitem", "option"),
    *("radio", "searchbox", "slider", "spinbutton", "switch", "tab", "table", "tabpanel", "textbox"),
}
"""Roles of elements that need a name."""
FAINT = """
const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const rgba = color => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
};
const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
    for (; element; element = element.parentElement) {
        const [r, g, b, a] = rgba(getComputedStyle(element).backgroundColor);
        if (a > 250) return [r, g, b];
    }
    return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest("[disabled], [aria-disabled=true], [aria-hidden=true], script, style")) continue;
    const style = getComputedStyle(element), back = behind(element), [r, g, b, a] = rgba(style.color);
    const front = [r, g, b].map((c, i) => (c * a + back[i] * (255 - a)) / 255);
    const [high, low] = [luminance(front), luminance(back)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.5 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (isLarge ? 3 : 4.5)) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return [...new Set(faint)];
"""
"""Check WCAG 2.2, success criterion 1.4.3. The script ignores backgrounds that are pictures or partly transparent."""


async def _nodes(page: Page) -> list[tuple[str, str]]:
    tree: dict[str, Any] = await page.command("Accessibility.getFullAXTree")
    return [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in tree["nodes"]
        if not node["ignored"] and "role" in node
    ]


async def roles(page: Page) -> dict[str, list[str]]:
    """Return the names of the elements by role, in the order of the page."""
    found: dict[str, list[str]] = {}
    for role, name in await _nodes(page):
        found.setdefault(role, []).append(name)
    return found


async def nameless(page: Page) -> list[str]:
    """Return the roles of the elements that need a name and have none."""
    return [role for role, name in await _nodes(page) if role in NAMED and not name]


async def faint_texts(page: Page) -> list[str]:
    """Return the texts whose contrast to their background is too low, each with its contrast ratio."""
    faint: list[str] = await page.run(FAINT)
    return faint


# Screenshots of the page for the docs, saved only if `$ROLLBUS_SCREENSHOTS` names a folder.


FOLDER = os.environ.get("ROLLBUS_SCREENSHOTS")


async def photograph(page: Page, name: str) -> None:
    """Save a screenshot to the file page-`name`.png if a folder is set."""
    if FOLDER:
        picture = await page.command("Page.captureScreenshot", format="png")
        _write(Path(FOLDER, f"page-{name}.png"), picture["data"])


def _write(path: Path, encoded: str) -> None:
    path.write_bytes(base64.b64decode(encoded))
