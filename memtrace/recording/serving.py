"""Starts ``memtrace serve --live`` for a running recording, in a process of its own."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from memtrace.errors import MemtraceError

TOKEN_VARIABLE: Final = "MEMTRACE_SERVE_TOKEN"
"""Environment variable with the token of a server; without it, the server makes a random one."""
_END_SECONDS: Final = 2.0


def require_server_packages() -> None:
    """Check that the packages of the server are installed.

    Raises:
        MemtraceError: one is missing; the message has the command that installs it.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MemtraceError(
            f'the server needs {" and ".join(missing)}. Install the server with: pip install "memtrace[serve]"'
        )


def start_server(trace: Path, *, host: str, port: int, capacity_bytes: int | None) -> str:
    """Start a server for a trace and return the address of its page; the server ends with this process.

    The address is known at once, because this process opens the port: requests wait until the server has started.

    Args:
        trace: folder of the trace.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        capacity_bytes: memory of every device; None: as the recording found it.

    Raises:
        MemtraceError: a package of the server is missing.
        OSError: the port cannot be opened, or the process cannot be started.
    """
    require_server_packages()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        token, bound_port = secrets.token_urlsafe(24), listener.getsockname()[1]
        command = [sys.executable, "-m", "memtrace.cli", "serve", str(trace), "--live", "--no-open", "--host", host,
                   "--descriptor", str(listener.fileno()), "--parent", str(os.getpid())]  # fmt: skip
        if capacity_bytes is not None:
            command += ["--capacity", f"{capacity_bytes}B"]
        process = subprocess.Popen(
            command,
            # The token is not among the arguments, which other users of the machine can see.
            env={**os.environ, TOKEN_VARIABLE: token, "PYTHONSAFEPATH": "1"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is meant for the training
        )
    atexit.register(_end, process, os.getpid())
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound_port}/?token={token}"


def _end(process: subprocess.Popen[bytes], started_by: int) -> None:
    if os.getpid() != started_by:
        return  # a forked child
    with suppress(OSError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_END_SECONDS)
