"""A proxy in front of an object store that goes wrong on demand.

    with Proxy(server) as proxy:
        proxy.fault = lambda request: "503" if request.method == "PUT" else None

Faults: a status ("409", "500", …) is answered and nothing forwarded; "lose" forwards and drops the reply; "stall" gives
no answer; "strip" forwards without the conditions; "cut" sends half of the reply's body and closes; "short" sends half
as if that were all.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self
from urllib.parse import urlsplit

CODES = {"403": "AccessDenied", "409": "ConditionalRequestConflict", "500": "InternalError", "503": "SlowDown"}
HOP = {"connection", "content-length", "expect", "transfer-encoding"}


class Request(NamedTuple):
    method: str
    path: str


class Proxy:
    """Listens at `url` and forwards to `server` until it is left; `requests` are those that came."""

    def __init__(self, server: str) -> None:
        self.fault: Callable[[Request], str | None] = lambda request: None
        self.requests: list[Request] = []
        self.over = threading.Event()
        target, proxy = urlsplit(server), self

        class Handler(_Handler):
            def handle_one(self) -> None:
                self.pass_on(proxy, str(target.hostname), int(target.port or 80))

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_one  # noqa: N815 - the library's names

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def pass_on(self, proxy: Proxy, host: str, port: int) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path)
        proxy.requests.append(request)
        fault = proxy.fault(request) or ""
        if fault == "stall":
            proxy.over.wait()
            self.close_connection = True
        elif fault in CODES:
            error = f"<Error><Code>{CODES[fault]}</Code><Message>told</Message></Error>".encode()
            self._answer(int(fault), {}, b"" if self.command == "HEAD" else error, str(len(error)))
        else:
            self._forward(host, port, body, fault)

    def _forward(self, host: str, port: int, body: bytes, fault: str) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        if fault == "strip":
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data, length = answer.read(), answer.headers.get("Content-Length", "0")
        connection.close()
        if fault == "lose":
            self.close_connection = True
            return
        if fault in ("cut", "short"):
            data = data[: len(data) // 2]
            self.close_connection = True
        told = {name: value for name, value in answer.headers.items() if name.lower() not in HOP | {"date", "server"}}
        self._answer(answer.status, told, data, str(len(data)) if fault == "short" else length)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": length}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
