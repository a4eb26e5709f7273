"""The page beside PyTorch's memory_viz, on the same snapshots in the same browser.

    python benchmarks/dashboard.py --viz FOLDER [--rounds 5] [--entries 1000000] [--snapshot FILE ...] [--json]

FOLDER has what memory_viz's page loads from the network: MemoryViz.js of pytorch/torch/utils/viz (newer versions
import process_alloc_data.js, which then lies beside it) and d3.min.js (``npm install d3@7``). Without --viz
only memtrace is measured. The snapshots are a real one of 25,000 entries and one that
../shared/tools/tile_snapshot.py repeats up to --entries.

Of each tool: size of the page, seconds to write it from the shell, seconds from opening the file to the first figure,
the time from a turn of the mouse wheel to the second frame after it, and then the memory of JavaScript (heap and
buffers). The tools alternate; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SHARED: Final = ROOT.parent / "shared"
SNAPSHOTS: Final = SHARED / "data" / "snapshots"
NUM_ZOOMS: Final = 12
FLAGS: Final = ("--no-sandbox", "--disable-gpu")
COMMANDS: Final = {
    "memory_viz": ("-m", "torch.cuda._memory_viz", "trace_plot"),
    "memtrace": ("-c", "from memtrace.cli import main; main()", "report"),
}
FIRST_FIGURE: Final = {
    "memory_viz": "document.querySelector('svg polygon, svg path.domain')",
    "memtrace": "document.querySelector('.tracks[data-drawn=true]')",
}
ZOOMED: Final = {"memory_viz": "document.querySelector('svg')", "memtrace": "document.querySelector('.tracks .area')"}
D3_NAMES: Final = ("axisLeft", "scaleLinear", "zoom", "zoomIdentity", "brushX")

WATCH: Final = """
const watch = () => {
  if (%s) requestAnimationFrame(() => { window.firstFigure ??= performance.now(); });
  else requestAnimationFrame(watch);
};
watch();
"""
ZOOM: Final = """async ([count]) => {
  const target = %s, box = target.getBoundingClientRect(), times = [];
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  for (let n = 0; n < count; n++) {
    const begin = performance.now();
    target.dispatchEvent(new WheelEvent("wheel", { deltaY: n < count / 2 ? -120 : 120, bubbles: true, cancelable: true,
      clientX: box.left + box.width / 2, clientY: box.top + Math.min(box.height / 2, 120) }));
    await frame();
    await frame();
    times.push(performance.now() - begin);
  }
  return times;
}"""


@dataclass(frozen=True)
class Measurement:
    """One round of one tool."""

    size_mb: float
    build_s: float
    first_figure_s: float
    zoom_s: float
    slowest_zoom_s: float
    memory_mb: float


def build(tool: str, snapshot: Path, page: Path) -> float:
    """Write the page of a snapshot and return the seconds that it took."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    subprocess.run([sys.executable, *COMMANDS[tool], str(snapshot), "-o", str(page)], check=True, env=environment,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    return time.perf_counter() - begin


def answer_from(folder: Path, route: Any) -> None:
    """Answer a request of memory_viz's page from local files."""
    name = route.request.url.rsplit("/", 1)[-1]
    if name.endswith(".js"):
        text = (folder / name).read_text()
        body = re.sub(r"import \* as d3 from", "import d3 from", text)
    else:
        names = ", ".join(D3_NAMES)
        library = (folder / "d3.min.js").read_text()
        body = f"const exports = {{}}, module = {{}};\n{library}\nexport default exports;\n"
        body += f"export const {{{names}}} = exports;"
    route.fulfill(body=body, content_type="text/javascript", headers={"Access-Control-Allow-Origin": "*"})


@contextmanager
def running_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


def measure(browser: Any, tool: str, snapshot: Path, page_path: Path, viz: Path | None) -> Measurement:
    """Write and open a page once."""
    seconds = build(tool, snapshot, page_path)
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    if viz is not None:
        page.route(re.compile("^https:"), lambda route: answer_from(viz, route))
    page.add_init_script(WATCH % FIRST_FIGURE[tool])
    page.goto(page_path.as_uri(), wait_until="commit", timeout=600_000)
    page.wait_for_function("() => window.firstFigure", timeout=600_000)
    first_figure = page.evaluate("window.firstFigure") / 1000
    zooms = [seconds / 1000 for seconds in page.evaluate(ZOOM % ZOOMED[tool], [NUM_ZOOMS])]
    session = context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    context.close()
    memory = usage["usedSize"] + usage.get("backingStorageSize", 0)
    size = page_path.stat().st_size
    return Measurement(size / 1e6, seconds, first_figure, statistics.median(zooms), max(zooms), memory / 1e6)


def medians(rounds: list[Measurement]) -> dict[str, float]:
    return {key: statistics.median(getattr(each, key) for each in rounds) for key in asdict(rounds[0])}


def print_table(name: str, results: dict[str, dict[str, float]]) -> None:
    print(f"\n{name}")
    columns = list(next(iter(results.values())))
    print(f"{'':12}" + "".join(f"{column:>16}" for column in columns))
    for tool, values in results.items():
        print(f"{tool:12}" + "".join(f"{values[column]:16.3f}" for column in columns))
    if len(results) > 1:
        ratios = (results["memory_viz"][column] / results["memtrace"][column] for column in columns)
        print(f"{'ratio':12}" + "".join(f"{ratio:16.1f}" for ratio in ratios))


def tile(folder: Path, entries: int) -> Path:
    target = folder / f"tiled_{entries}.pickle"
    base = SNAPSHOTS / "transformer_training_step.pickle"
    subprocess.run([sys.executable, str(SHARED / "tools" / "tile_snapshot.py"), str(base), str(target), "--events",
                    str(entries), "--fresh-lists"], check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viz", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--snapshot", type=Path, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tools = list(COMMANDS) if options.viz else ["memtrace"]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary, running_browser() as browser:
        folder = Path(temporary)
        snapshots = options.snapshot or [SNAPSHOTS / "wrapped_ring_25000.pickle", tile(folder, options.entries)]
        for snapshot in snapshots:
            rounds: dict[str, list[Measurement]] = {tool: [] for tool in tools}
            for _ in range(options.rounds):
                for tool in tools:
                    rounds[tool].append(measure(browser, tool, snapshot, folder / f"{tool}.html", options.viz))
            results[snapshot.name] = {tool: medians(rounds[tool]) for tool in tools}
            if not options.json:
                print_table(snapshot.name, results[snapshot.name])
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
