"""Figures as files: PNG, SVG, PDF, JPEG and WebP through kaleido and a browser, and HTML without either."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memtrace.dashboards.assets import PLOTLY

from memtrace.errors import MemtraceError
from memtrace.format.storage import AnyPath, to_path
from memtrace.format.storage_writer import local_output

if TYPE_CHECKING:
    import plotly.graph_objects as go

IMAGE_FORMATS: Final = ("png", "svg", "pdf", "jpeg", "webp")
"""Suffixes of the files that kaleido writes."""
BROWSER_VARIABLE: Final = "BROWSER_PATH"
"""Environment variable that names the browser; kaleido reads it."""
BROWSERS: Final = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
"""Programs that kaleido can use, the smallest first."""


def write_figure(
    figure: go.Figure, output: str | AnyPath, *, width: int | None = None, height: int | None = None, scale: float = 2.0
) -> AnyPath:
    """Write a figure to a file in the format that its suffix names, and return the path.

    Args:
        figure: the figure.
        output: path of the file, or its URL in a storage; its suffix is one of ``IMAGE_FORMATS``, or ``.html``.
        width: width in CSS pixels; default: 900.
        height: height in CSS pixels; default: that of the figure, else 500.
        scale: pixels of the image for each CSS pixel.

    Raises:
        MemtraceError: the format is unknown, or kaleido or a browser is missing.
        OSError: the file cannot be written.
    """
    path = to_path(output)
    suffix = path.suffix.lower().removeprefix(".").replace("jpg", "jpeg")
    if suffix == "html":
        content = _html(figure).encode()
    elif suffix in IMAGE_FORMATS:
        content = _image(
            figure, path, {"format": suffix, "width": width or 900, "height": height or figure.layout.height or 500,
                           "scale": scale}
        )  # fmt: skip
    else:
        formats = ", ".join(f".{name}" for name in (*IMAGE_FORMATS, "html"))
        raise MemtraceError(f"{output}: unknown format. Use one of {formats} as the suffix of the file.")
    with local_output(output) as target:
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(target)
    return path


def find_browser() -> str | None:
    """Return the browser that draws images: the one of BROWSER_PATH, else the first that is installed."""
    named = os.environ.get(BROWSER_VARIABLE)
    if named:
        return named
    return next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)


def _html(figure: go.Figure) -> str:
    """Return an HTML page that works offline; our plotly.js is a third of the size of plotly's own."""
    body = figure.to_html(include_plotlyjs=False, full_html=False, config={"displaylogo": False, "responsive": True})
    script = PLOTLY.read_text(encoding="utf-8")
    background = figure.layout.template.layout.paper_bgcolor or "#ffffff"
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>memtrace</title>"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body style="margin:0;background:{background}">\n'
        f"<script>{script}</script>\n{body}\n</body>\n</html>\n"
    )


def _image(figure: go.Figure, path: AnyPath, options: dict[str, Any]) -> bytes:
    try:
        import kaleido
    except ImportError as error:
        raise MemtraceError(
            f"{path}: writing images needs kaleido, which is not installed. Run pip install 'memtrace[images]', or "
            "write an .html file."
        ) from error
    browser = find_browser()
    if browser is None or not Path(browser).is_file():
        missing = "no browser was found" if browser is None else f"{BROWSER_VARIABLE} names {browser}, which is no file"
        raise MemtraceError(
            f"{path}: writing images needs Chrome or Chromium, and {missing}. Install one (on Debian: apt-get install "
            f"chromium-headless-shell), set {BROWSER_VARIABLE}, or write an .html file."
        )
    with _browser(browser):
        try:
            # MathJax would be fetched from the network, and no figure has formulas.
            content: bytes = kaleido.calc_fig_sync(figure.to_dict(), opts=options, kopts={"mathjax": False})
        except Exception as error:  # kaleido and its browser raise errors of many types
            raise MemtraceError(
                f"{path}: the browser {browser} failed to draw the figure ({type(error).__name__}). Set "
                f"{BROWSER_VARIABLE} to another Chrome or Chromium, or write an .html file."
            ) from error
    return content


@contextmanager
def _browser(path: str) -> Iterator[None]:
    """Make kaleido use a browser, without its log on stderr."""
    previous = os.environ.get(BROWSER_VARIABLE)
    loggers = [logging.getLogger(name) for name in ("choreographer", "kaleido")]
    levels = [logger.level for logger in loggers]
    os.environ[BROWSER_VARIABLE] = path
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if previous is None:
            del os.environ[BROWSER_VARIABLE]
        else:
            os.environ[BROWSER_VARIABLE] = previous
