"""Pages in headless Chromium, which must run without an error and request nothing from outside."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

CHROMIUM: Final = next(
    (path for name in ("chromium-headless-shell", "chromium") if (path := shutil.which(name)) is not None), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is missing: apt-get install chromium-headless-shell"
)
TIMEOUT_MS: Final = 30_000
"""For a loaded machine: nothing on a page takes longer than two seconds."""
_FLAGS: Final = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]


@contextmanager
def launched_browser() -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, fragment: str = "", width: int = 1280, **options: Any) -> Iterator[Any]:
    """A page of a file, offline, with its first widget drawn.

    Leaving the block checks that no script failed, that nothing was written to the console as an error, and that no
    request left the page.

    Args:
        browser: A browser of ``launched_browser``.
        path: The HTML file.
        fragment: Part of the address from ``#``.
        width: Width of the window in CSS pixels.
        options: Arguments of playwright's ``new_context``.
    """
    errors: list[str] = []
    requests: list[str] = []
    context = browser.new_context(
        offline=True, viewport={"width": width, "height": 900}, **{"reduced_motion": "reduce", **options}
    )
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri() + fragment)
    widget = page.locator(".view:not([hidden]) .widget").first
    if widget.count():
        widget.scroll_into_view_if_needed()
        page.wait_for_selector(".view:not([hidden]) .widget[data-drawn=true]")
    yield page
    context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []


def draw_everything(page: Any) -> None:
    """Scroll to every figure and widget of the visible view and wait until it is drawn."""
    for element in page.query_selector_all(".figure, .widget"):
        if element.is_visible():
            element.scroll_into_view_if_needed()
            page.wait_for_function("element => element.dataset.drawn === 'true'", arg=element)
