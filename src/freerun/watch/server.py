"""The page of `freerun watch`: read-only, for one machine's own user unless told otherwise.

Every request needs the token and a Host that is ours (a page on the Internet whose name suddenly points here has
another); a browser's request from another origin is refused. Runs are addressed by the names that were found, never by
a path, and nothing can be written.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from freerun.core import UserError

try:
    import plotly
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, QueryParams
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as missing:
    raise UserError(f"freerun watch needs {missing.name}: pip install 'freerun[watch]'") from None

from freerun.watch.runs import WatchedRun
from freerun.watch.shelf import Shelf

DEFAULT_PORT = 8642
MOST_PORT = 65535
PAGE = Path(__file__).parent / "page"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
MOST_CELLS = 2000
SHORTEST_TOKEN = 16
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the token is in the address
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


# ---------------------------------------------------------------------------------------------- who may ask


class Guard:
    """Refuses with 403 what is not asked by somebody who knows the token, under a name of ours."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]):
        self._app = app
        self._token = token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reason = self._reason_to_refuse(Headers(scope=scope), QueryParams(scope["query_string"]))
        response = self._app if reason is None else PlainTextResponse(reason + "\n", 403)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await response(scope, receive, send_with_headers)

    def _reason_to_refuse(self, headers: Headers, query: QueryParams) -> str | None:
        if [host.lower() for host in headers.getlist("host")] not in [[host] for host in self._hosts]:
            return "this page is not served under that name"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self._hosts}:
            return "another page may not ask"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "another page may not ask"
        if not secrets.compare_digest(query.get("token", "").encode(), self._token):
            return "the token is missing or wrong: use the address that freerun watch has printed"
        return None


def own_hosts(host: str, port: int) -> frozenset[str]:
    """What the Host header may say."""
    names = {host, "localhost", "127.0.0.1", "[::1]"} if is_loopback(host) else {host}
    if host in ("0.0.0.0", "::"):  # any of this machine's own
        names |= {"localhost", "127.0.0.1", "[::1]", socket.gethostname().lower(), *_addresses()}
    return frozenset(f"{f'[{name}]' if ':' in name and name[0] != '[' else name}:{port}" for name in names)


def _addresses() -> set[str]:
    import psutil

    found = [each.address for every in psutil.net_if_addrs().values() for each in every]
    return {address.partition("%")[0] for address in found if _is_address(address.partition("%")[0])}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


# ---------------------------------------------------------------------------------------------- what is answered


class Page:
    """Handlers are plain functions: Starlette runs them on threads, and each run is looked at under its own lock."""

    def __init__(self, shelf: Shelf, token: str, selected: str | None):
        self._shelf = shelf
        self._token = token
        self._selected = selected

    def routes(self) -> list[Route]:
        handlers: dict[str, Callable[[Request], Response]] = {
            "/": self.index,
            "/page.js": self.asset("page.js", "text/javascript"),
            "/page.css": self.asset("page.css", "text/css"),
            "/plotly.js": lambda request: FileResponse(PLOTLY, media_type="text/javascript"),
            "/api/runs": self.runs,
            "/api/run": self.run,
            "/api/curves": self.curves,
            "/api/timeline": self.timeline,
        }
        return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]

    def index(self, request: Request) -> Response:
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(page.replace("TOKEN", quote(self._token, safe="")))

    def asset(self, name: str, media_type: str) -> Callable[[Request], Response]:
        return lambda request: FileResponse(PAGE / name, media_type=media_type)

    def runs(self, request: Request) -> Response:
        found = self._shelf.list()
        return JSONResponse({"runs": found, "selected": self._selected})

    def run(self, request: Request) -> Response:
        with self._looked_at(request) as run:
            return JSONResponse(run.overview())

    def curves(self, request: Request) -> Response:
        """Nothing but the number of updates where the page has them already."""
        with self._looked_at(request) as run:
            num_updates = run.curves.num_updates
            if request.query_params.get("have") == str(num_updates):
                return JSONResponse({"num_updates": num_updates})
            return JSONResponse({"num_updates": num_updates, "columns": run.curves.columns()})

    def timeline(self, request: Request) -> Response:
        query = request.query_params
        with self._looked_at(request) as run:
            stop = float(query["stop"]) if "stop" in query else None
            num_cells = min(MOST_CELLS, max(1, int(query.get("cells", 400))))
            return JSONResponse(run.cells(float(query.get("start", 0.0)), stop, num_cells))

    @contextlib.contextmanager
    def _looked_at(self, request: Request) -> Iterator[WatchedRun]:
        run = self._shelf.find(request.query_params.get("id", ""))
        with run.lock:
            run.look()
            yield run


def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "there is no such run"}, 404)


def _bad_number(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "start, stop and cells are numbers"}, 400)


def make_app(shelf: Shelf, token: str, hosts: frozenset[str], selected: str | None = None) -> Starlette:
    return Starlette(
        routes=Page(shelf, token, selected).routes(),
        middleware=[Middleware(Guard, token=token, hosts=hosts), Middleware(GZipMiddleware, minimum_size=2000)],
        exception_handlers={KeyError: _not_found, ValueError: _bad_number},
    )


# ---------------------------------------------------------------------------------------------- serving


def serve(
    paths: Sequence[Path],
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    selected: str | None = None,
    announce: Callable[[str], Any] = print,
) -> None:
    """Until Ctrl-C."""
    if not is_loopback(host) and len(token or "") < SHORTEST_TOKEN:
        raise UserError(
            f"--host {host} can be reached from other machines: give a --token of {SHORTEST_TOKEN} characters or more, "
            "and tell it only those who may look"
        )
    token = token or secrets.token_urlsafe(16)
    listener = _listen(host, port)
    listener.listen()
    port = listener.getsockname()[1]
    app = make_app(Shelf(paths), token, own_hosts(host.lower(), port), selected)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{port}/?token={quote(token, safe='')}")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def end_with_input() -> None:
    """End this process when whoever started it has gone; and leave the cores to others meanwhile."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    os.nice(10)
    threading.Thread(target=wait, name="freerun-input", daemon=True).start()


def _listen(host: str, port: int | None) -> socket.socket:
    """On the port that was asked for, or else the usual one, or else any."""
    if port is not None and not 0 <= port <= MOST_PORT:
        raise UserError(f"--port must lie between 0 and {MOST_PORT}, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port is not None else [DEFAULT_PORT, 0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
    raise UserError(f"freerun watch cannot listen on {host}:{candidate}: {reason}; choose another --host or --port")
