"""The reference of the routes in a browser."""

import pytest
from selenium.webdriver import Chrome

from tests.browser.page import opened
from tests.http.support import http_before

pytestmark = pytest.mark.slow


async def test_the_reference_page_obeys_its_content_security_policy(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The reference page violates no rule of its content security policy and loads nothing from other origins."""
    async with http_before(nats_url, fleet) as http, opened(browser, f"{http.url}/docs") as page:
        await page.until_text("body", lambda text: text is not None and "/v1/rl/state" in text)
