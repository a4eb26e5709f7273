"""Runs the server until it is interrupted, or until the process that started it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import Final

import uvicorn
from memtrace.dashboards.server.access import is_wildcard, new_token
from memtrace.dashboards.server.app import create_app
from memtrace.dashboards.server.served import ServedTrace

from memtrace.errors import MemtraceError

DEFAULT_HOST: Final = "127.0.0.1"
NICENESS: Final = 10
_PARENT_SECONDS: Final = 0.5


def run_server(
    served: ServedTrace,
    *,
    host: str = DEFAULT_HOST,
    port: int = 0,
    token: str | None = None,
    open_browser: bool = False,
    parent: int | None = None,
    descriptor: int | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serve traces until the process is interrupted.

    Args:
        served: the traces.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        token: what requests have to carry; None: a random one.
        open_browser: open the page in the browser of this machine.
        parent: process whose end ends the server; None: nothing but an interrupt does.
        descriptor: socket that listens already, instead of ``host`` and ``port``.
        announce: called with the address of the page once the server listens.

    Raises:
        MemtraceError: the address cannot be listened on.
    """
    listener = start_listening(host, port) if descriptor is None else socket.socket(fileno=descriptor)
    bound_port = int(listener.getsockname()[1])
    token = token or new_token()
    app = create_app(served, token=token, host=host, cookie=f"memtrace-{bound_port}")
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off",
                            timeout_graceful_shutdown=1)  # fmt: skip
    server = uvicorn.Server(config)
    url = f"http://{_shown_host(host)}:{bound_port}/?token={token}"
    served.start()
    announce(url)
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    if parent is not None:
        with contextlib.suppress(OSError):
            os.nice(NICENESS)  # the training goes first
        threading.Thread(target=_end_with_parent, args=(server, parent), daemon=True).start()
    try:
        with contextlib.suppress(KeyboardInterrupt), listener:
            asyncio.run(server.serve([listener]))
    finally:
        served.stop()


def start_listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; MemtraceError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MemtraceError(
            f"cannot listen on {host}, port {port} ({reason}). Pass another address with --host, or another port with "
            "--port (0: any free port)."
        ) from error
    return listener


def _shown_host(host: str) -> str:
    if is_wildcard(host):
        return socket.gethostname()
    return f"[{host.strip('[]')}]" if ":" in host else host


def _end_with_parent(server: uvicorn.Server, parent: int) -> None:
    """End the server when the process that started it has ended."""
    ended = threading.Event()
    while os.getppid() == parent and not server.should_exit:
        ended.wait(_PARENT_SECONDS)
    server.should_exit = True
