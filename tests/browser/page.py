"""A page in the browser, as a person has it: what it shows, what is clicked, and what the browser complains about."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By

from tests.support.patience import SOON_S

__all__ = ["DESKTOP", "PHONE", "Page", "Size", "Theme", "each", "opened"]

T = TypeVar("T")
Theme = Literal["light", "dark"]
LOOK_AGAIN_S = 0.1
FAILED_REQUEST = "network"
"""The console's word for where it complains of a request that failed, or whose answer is from 400 on."""


def each(selector: str, expression: str) -> str:
    """A script that returns a list: of each such element `one`, what the expression says."""
    return f"return [...document.querySelectorAll({json.dumps(selector)})].map(one => {expression})"


@dataclass(frozen=True)
class Size:
    """What a screen shows at once, in CSS pixels."""

    width: int
    height: int
    is_mobile: bool = False


DESKTOP = Size(1400, 900)
PHONE = Size(390, 844, is_mobile=True)


@dataclass
class Page:
    """An open page; made by `opened`."""

    driver: Chrome
    origin: str
    complaints: list[str] = field(default_factory=list)
    """What the console has said, from warnings on."""
    urls: list[str] = field(default_factory=list)
    """Of all that was asked for by this page."""
    may_fail: bool = False
    """Requests may fail, or be refused."""

    async def _do(self, act: Callable[[], T]) -> T:
        # The driver's calls block, and the service is in this process.
        return await asyncio.to_thread(act)

    async def run(self, script: str, *arguments: object) -> Any:
        """What a function with this body returns in the page."""
        return await self._do(lambda: self.driver.execute_script(script, *arguments))

    async def command(self, name: str, **parameters: object) -> Any:
        """What Chromium's own protocol answers to a command."""
        return await self._do(lambda: self.driver.execute_cdp_cmd(name, parameters))

    async def until(self, script: str, expected: object = True, *arguments: object) -> Any:
        """Look again and again until `script` returns `expected`, or holds of what it returns if that is callable."""
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
        """Wait until the shown text of the first such element is `expected`, or holds of it; None: there is none."""
        return await self.until("return document.querySelector(arguments[0])?.innerText", expected, selector)

    async def texts(self, selector: str) -> list[str]:
        """The shown text of each such element."""
        found: list[str] = await self.run(each(selector, "one.innerText"))
        return found

    async def click(self, selector: str) -> None:
        """Click on an element once it can be seen; fails where another element lies above."""
        await self.until("return document.querySelector(arguments[0])?.checkVisibility() ?? false", True, selector)
        await self._do(lambda: self.driver.find_element(By.CSS_SELECTOR, selector).click())

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other, as the element with the focus gets them."""
        await self._do(lambda: ActionChains(self.driver).send_keys(*keys).perform())

    async def resize(self, size: Size) -> None:
        """Have another screen."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=size.width,
            height=size.height,
            mobile=size.is_mobile,
            deviceScaleFactor=2 if size.is_mobile else 1,
        )

    async def like(self, theme: Theme) -> None:
        """Prefer light or dark pages."""
        await self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def goto(self, address: str) -> None:
        """Load an address, after which the browser looks for what it has said so far."""
        await self._do(lambda: self.driver.get(address))
        await self.listen()

    async def listen(self) -> None:
        """Take over what the browser has noted."""
        for entry in await self._do(lambda: self._log("browser")):
            if entry["level"] in ("SEVERE", "WARNING") and not (self.may_fail and entry["source"] == FAILED_REQUEST):
                self.complaints.append(f"{entry['source']}: {entry['message']}")
        for entry in await self._do(lambda: self._log("performance")):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent" and event["params"]["documentURL"] != BLANK:
                self.urls.append(event["params"]["request"]["url"])

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]

    @property
    def strangers(self) -> list[str]:
        """Addresses of other origins than the service's that the page has asked for."""
        return [url for url in self.urls if not url.startswith((f"{self.origin}/", "data:"))]


BLANK = "about:blank"


@contextlib.asynccontextmanager
async def opened(
    driver: Chrome, address: str, *, size: Size = DESKTOP, theme: Theme = "light", may_fail: bool = False
) -> AsyncIterator[Page]:
    """Open an address; in the end nothing has been complained of, and nothing asked for elsewhere.

    Args:
        may_fail: the test makes requests fail, which the console tells of.
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
        # Ends its streams before the service ends.
        await page.goto(BLANK)
    # Said here, since pytest explains only what stands in a test.
    assert page.complaints == [], page.complaints
    assert page.strangers == [], page.strangers
