"""Who may use the server: the one who has its token, through an address that is meant for it.

The token is in the address that is opened first; the answer moves it into a cookie that no script can read and no other
site can send. The Host header is checked because a page elsewhere can make its own name point to this machine (DNS
rebinding). Nothing is shared with other origins.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from ipaddress import ip_address
from socket import gethostname
from typing import Final

from starlette.datastructures import URL, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "worker-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""
_WILDCARDS: Final = ("0.0.0.0", "::", "")
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


class Guard:
    """Answers only requests that carry the token and are addressed to this server.

    Args:
        app: the application behind it.
        token: the token.
        host: the address that the server listens on.
        cookie: name of the cookie; different for servers on different ports.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._host = host
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        response = self._refusal(request)
        if response is None and "token" in request.query_params:
            response = self._with_cookie(request.url)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (response or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not allowed; None for the others."""
        if not is_own_host(request.headers.get("host", ""), self._host):
            return PlainTextResponse("memtrace: this address is not that of the server.\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("memtrace: the server only answers GET.\n", 405)
        if request.headers.get("sec-fetch-site") == "cross-site" and request.url.path != "/":
            return PlainTextResponse("memtrace: the request comes from another site.\n", 403)
        if not any(secrets.compare_digest(given.encode(), self._token.encode()) for given in self._tokens(request)):
            return PlainTextResponse(
                "memtrace: open the address that memtrace serve printed; it ends with the token.\n", 403
            )
        return None

    def _tokens(self, request: Request) -> Iterable[str]:
        yield request.query_params.get("token", "")
        yield request.cookies.get(self._cookie, "")
        yield request.headers.get("authorization", "").removeprefix("Bearer ")

    def _with_cookie(self, url: URL) -> Response:
        """Return an answer that moves the token from the address into the cookie."""
        rest = url.remove_query_params("token")
        response = RedirectResponse(f"{rest.path}?{rest.query}" if rest.query else rest.path, 303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return response


def is_own_host(header: str, bound_host: str) -> bool:
    """Return whether the Host header of a request names this server.

    The port is not compared: it differs where the port is forwarded, such as by ssh.

    Args:
        header: the Host header.
        bound_host: the address that the server listens on.
    """
    name = URL(f"http://{header}").hostname if header and not set(header) & set("/@\\?# ") else None
    if name is None:
        return False
    if name in _LOCAL or name == bound_host.strip("[]").lower():
        return True
    return is_wildcard(bound_host) and (_is_address(name) or name == gethostname().lower())


def is_wildcard(host: str) -> bool:
    """Return whether a server that listens on ``host`` answers on all addresses of the machine."""
    return host.strip("[]") in _WILDCARDS


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
