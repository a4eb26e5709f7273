"""The application of ``memtrace serve``: the page, the payloads of windows, and the status of recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from memtrace.dashboards.page import render
from memtrace.dashboards.server.access import Guard
from memtrace.dashboards.server.pages import MAX_REPORT_EVENTS, render_start
from memtrace.dashboards.server.served import ServedRank, ServedTrace
from memtrace.dashboards.server.status import describe_status
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from memtrace.errors import MemtraceError

_BUSY: Final = 503


class _BadRequest(Exception):
    """A parameter of a request is missing or invalid."""


def create_app(served: ServedTrace, *, token: str, host: str, cookie: str = "memtrace") -> ASGIApp:
    """Return the application.

    Args:
        served: the traces.
        token: what a request has to carry.
        host: the address that the server listens on.
        cookie: name of the cookie for the token.
    """

    def answer(make: Callable[[Request], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            served.note_request()
            try:
                return await run_in_threadpool(make, request)
            except _BadRequest as error:
                return PlainTextResponse(f"memtrace: {error}\n", 400)
            except (MemtraceError, OSError) as error:
                # A ring may have deleted the part while it was read; the next request finds the new ones.
                return PlainTextResponse(f"memtrace: {error}\n", _BUSY)

        return endpoint

    routes = [
        Route("/", answer(lambda _: HTMLResponse(render_start(served)))),
        Route("/range", answer(lambda request: HTMLResponse(_range_page(served, request)))),
        Route("/api/payload", answer(lambda request: _payload(served, request))),
        Route("/api/status", answer(lambda _: JSONResponse(describe_status(served)))),
    ]
    return Guard(Starlette(routes=routes), token=token, host=host, cookie=cookie)


def _payload(served: ServedTrace, request: Request) -> Response:
    rank, device = _view(served, request)
    window = _time(request, "from_ns"), _time(request, "to_ns")
    with rank.lock:
        if rank.current is None:
            return PlainTextResponse("memtrace: the trace is still being indexed.\n", _BUSY)
        version, payload = rank.version, rank.payload(device, *window)
    if payload is None:
        return JSONResponse({"version": version, "payload": None})
    return JSONResponse({"version": version, "payload": vars(payload)})


def _range_page(served: ServedTrace, request: Request) -> str:
    rank, _ = _view(served, request)
    with rank.lock:
        if rank.current is None:
            raise _BadRequest("the trace is still being indexed.")
        window = _time(request, "from_ns"), _time(request, "to_ns")
        num_events = rank.current.index.events_around(*window)
        if num_events > MAX_REPORT_EVENTS:
            raise _BadRequest(
                f"the range lies in parts of {num_events:,} events; the page of all results has at most "
                f"{MAX_REPORT_EVENTS:,}. Zoom in, and open the page again."
            )
        return render(rank.current.trace.window(start_ns=window[0], end_ns=window[1]))


def _view(served: ServedTrace, request: Request) -> tuple[ServedRank, str]:
    """Return the rank and the device that a request names, such as ``0-cuda-1``."""
    for rank in served.ranks.values():
        for view, device in rank.views().items():
            if view == request.query_params.get("view"):
                return rank, device
    raise _BadRequest("the parameter view names no rank and device of the trace.")


def _time(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise _BadRequest(f"the parameter {name} is not a number of nanoseconds.")
    return int(text)
