"""A server on a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from memtrace.dashboards.server.app import create_app
from memtrace.dashboards.server.run import start_listening
from memtrace.dashboards.server.served import ServedTrace

TOKEN = "token-of-a-test"


@contextmanager
def served_in_thread(served: ServedTrace) -> Iterator[str]:
    """Yield the address of the page."""
    listener = start_listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app = create_app(served, token=TOKEN, host="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    served.start()
    thread.start()
    try:
        assert served.is_indexed.wait(60)
        yield f"http://127.0.0.1:{port}/?token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join(30)
        served.stop()
        listener.close()
