"""One browser for all tests of a module."""

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from tests.browser.page import missing, running_chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start a browser, or skip the tests if this machine has none."""
    if reason := missing():
        pytest.skip(reason)
    with running_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
