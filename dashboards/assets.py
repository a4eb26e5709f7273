"""What every page contains: style sheet in the colors of the themes, plotly.js, and data that is safe in a script."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from markupsafe import Markup
from memtrace.dashboards.palette import CATEGORY_COLORS, THEMES

if TYPE_CHECKING:
    from jinja2 import Environment

PLOTLY: Final = Path(__file__).parent / "vendor" / "plotly-cartesian.min.js"

# Plotly draws with inline styles and creates images as blobs. The page fetches nothing.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; worker-src blob:"
)


def script_safe(text: str) -> Markup:
    """Escape JSON so that it cannot end the script element that contains it."""
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _style_sheet(source: str) -> Markup:
    """Return a style sheet behind the variables of the themes and the colors of the categories."""
    variables = "".join(
        f"{selector}{{color-scheme:{name};" + "".join(f"--{key}:{value};" for key, value in THEMES[name].items()) + "}"
        for selector, name in ((":root", "light"), (':root[data-theme="dark"]', "dark"))
    )
    swatches = "".join(
        f'.swatch[data-category="{name}"]{{background:{color}}}' for name, color in CATEGORY_COLORS.items()
    )
    return Markup(variables + swatches + source)


def inline_sources(environment: Environment, scripts: Sequence[str]) -> dict[str, Markup]:
    """Return what a page contains besides its contents: ``style``, ``script``, ``worker`` and ``plotly``.

    Args:
        environment: Loads the templates.
        scripts: Files in the order in which they use each other; they share one scope.
    """

    def source(name: str) -> str:
        assert environment.loader is not None
        return environment.loader.get_source(environment, name)[0]

    return {
        "style": _style_sheet(source("report.css")),
        "worker": Markup(source("worker.js")),
        "script": Markup('(() => {\n"use strict";\n' + "".join(map(source, scripts)) + "})();"),
        "plotly": _packed_plotly(),
    }


@cache
def _packed_plotly() -> Markup:
    """Return plotly.js, compressed and in base64: the page unpacks it for the first figure that needs it."""
    return Markup(base64.b64encode(zlib.compress(PLOTLY.read_bytes(), 9)).decode("ascii"))
