"""Serves the page of `freerun watch`. It is read-only, and only for this machine unless the user says otherwise.

Every request needs the token, and a Host header that names this machine: after DNS rebinding the header names another
one. A browser's request from another origin is refused. Runs are addressed by the names that were found, never by a
path, and nothing can be written.
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

from freerun.tools.watch.run_list import RunList
from freerun.tools.watch.watched_run import WatchedRun

DEFAULT_PORT = 8642
MOST_PORT = 65535
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("common.js", "runs.js", "sweep.js", "charts.js", "timeline.js", "page.js")
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


class AccessCheck:
    """Middleware that answers 403 unless a request has the right token, a Host of this machine and the same origin."""

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
        # Exactly one Host header: with two, a proxy and this server might read different ones.
        if [host.lower() for host in headers.getlist("host")] not in [[host] for host in self._hosts]:
            return "this page is not served under that name"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self._hosts}:
            return "another page may not ask"
        # Browsers send this header for every request, also where they send no Origin.
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "another page may not ask"
        # This comparison takes the same time for every token, so that the time reveals nothing about it.
        if not secrets.compare_digest(query.get("token", "").encode(), self._token):
            return "the token is missing or wrong: use the address that freerun watch has printed"
        return None


def own_hosts(host: str, port: int) -> frozenset[str]:
    """Return the values that the Host header may have."""
    names = {host, "localhost", "127.0.0.1", "[::1]"} if is_loopback(host) else {host}
    if host in ("0.0.0.0", "::"):  # it listens on all addresses of this machine
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


class RequestHandlers:
    """Answers requests. Starlette runs plain functions on threads, so each run is read under its own lock."""

    def __init__(self, runs: RunList, token: str, selected: str | None):
        self._runs = runs
        self._token = token
        self._selected = selected

    def routes(self) -> list[Route]:
        handlers: dict[str, Callable[[Request], Response]] = {
            "/": self.index,
            **{f"/{name}": self.asset(name, "text/javascript") for name in SCRIPTS},
            "/page.css": self.asset("page.css", "text/css"),
            "/plotly.js": lambda request: FileResponse(PLOTLY, media_type="text/javascript"),
            "/api/runs": self.runs,
            "/api/run": self.run,
            "/api/curves": self.curves,
            "/api/timeline": self.timeline,
        }
        # GET only: nothing can be changed through this server.
        return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]

    def index(self, request: Request) -> Response:
        # The scripts and the style sheet need the token too.
        page = (PAGE / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(page.replace("TOKEN", quote(self._token, safe="")))

    def asset(self, name: str, media_type: str) -> Callable[[Request], Response]:
        return lambda request: FileResponse(PAGE / name, media_type=media_type)

    def runs(self, request: Request) -> Response:
        found = self._runs.list()
        return JSONResponse({"runs": found, "selected": self._selected})

    def run(self, request: Request) -> Response:
        with self._read_run(request) as run:
            return JSONResponse({**run.overview(), "sweep": self._runs.sweep_of(run)})

    def curves(self, request: Request) -> Response:
        """Answer with the curves, or with the number of updates alone if the page has all of them already."""
        with self._read_run(request) as run:
            num_updates = run.curves.num_updates
            if request.query_params.get("have") == str(num_updates):
                return JSONResponse({"num_updates": num_updates})
            return JSONResponse({"num_updates": num_updates, "columns": run.curves.columns()})

    def timeline(self, request: Request) -> Response:
        query = request.query_params
        with self._read_run(request) as run:
            stop = float(query["stop"]) if "stop" in query else None
            # A limit, because the answer grows with the number of cells.
            num_cells = min(MOST_CELLS, max(1, int(query.get("cells", 400))))
            return JSONResponse(run.cells(float(query.get("start", 0.0)), stop, num_cells))

    @contextlib.contextmanager
    def _read_run(self, request: Request) -> Iterator[WatchedRun]:
        run = self._runs.find(request.query_params.get("id", ""))
        with run.lock:
            run.read_new()
            yield run


def _not_found(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "there is no such run"}, 404)


def _bad_number(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "start, stop and cells are numbers"}, 400)


def make_app(runs: RunList, token: str, hosts: frozenset[str], selected: str | None = None) -> Starlette:
    return Starlette(
        routes=RequestHandlers(runs, token, selected).routes(),
        middleware=[Middleware(AccessCheck, token=token, hosts=hosts), Middleware(GZipMiddleware, minimum_size=2000)],
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
    """Serve the page until Ctrl-C; `announce` gets its address."""
    if not is_loopback(host) and len(token or "") < SHORTEST_TOKEN:
        raise UserError(
            f"--host {host} can be reached from other machines: give a --token of {SHORTEST_TOKEN} characters or more, "
            "and tell it only those who may look"
        )
    token = token or secrets.token_urlsafe(16)
    # Listening begins before the address is announced, so that nobody comes too early.
    listener = _listen(host, port)
    listener.listen()
    port = listener.getsockname()[1]
    app = make_app(RunList(paths), token, own_hosts(host.lower(), port), selected)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{port}/?token={quote(token, safe='')}")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def end_with_input() -> None:
    """End this process when its standard input ends, and give other processes priority until then."""

    def wait() -> None:
        sys.stdin.buffer.read()  # it returns when the process that started this one has ended
        os.kill(os.getpid(), signal.SIGTERM)

    os.nice(10)  # the learner needs the cores more than this page
    threading.Thread(target=wait, name="freerun-input", daemon=True).start()


def _listen(host: str, port: int | None) -> socket.socket:
    """Listen on the port that was asked for, otherwise on the usual one, or on any if that is taken."""
    if port is not None and not 0 <= port <= MOST_PORT:
        raise UserError(f"--port must lie between 0 and {MOST_PORT}, not {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port] if port is not None else [DEFAULT_PORT, 0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A server that has just ended must not block its port for the minute of TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
    raise UserError(f"freerun watch cannot listen on {host}:{candidate}: {reason}; choose another --host or --port")
