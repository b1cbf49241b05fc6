"""The thread of rank 0 that serves metrics and posts progress, and the address it listens at."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import logging
import os
import selectors
import socket
import socketserver
import threading
from collections.abc import Callable

from tfscale.config import ConfigError, parse_address
from tfscale.monitor.kubeflow import Poster
from tfscale.monitor.page import CONTENT_TYPE, Numbers, render

logger = logging.getLogger("tfscale")

_TURN_S = 1.0
_READER_S = 2.0  # that a reader has to send its request, and to take the page
_END_S = 4.0  # that a post under way has when the program ends


def listen(text: str, name: str) -> socket.socket:
    """A socket that listens at an address; `name` is the option or variable that gave it.

    Args:
        text: As for `tfscale.config.parse_address`.
        name: For errors.

    Returns:
        The socket, which the caller closes.

    Raises:
        ConfigError: The address is malformed or not one of this host, another program uses the
            port, or this user may not.
    """
    host, port = parse_address(text, name)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(_refused(name, text, error, "Name an address of this host.")) from error
    try:
        # A restarted job can listen at once where connections of the last attempt linger.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(8)
    except OSError as error:
        listening.close()
        remedy = "Choose another port, or an address of rank 0's host."
        raise ConfigError(_refused(name, text, error, remedy)) from error
    return listening


def _refused(name: str, text: str, error: OSError, remedy: str) -> str:
    return (
        f"{name} must be an address at which rank 0 can listen. Received: {name} {text}: "
        f"{error.strerror or error}. {remedy}"
    )


class _Server(socketserver.TCPServer):
    """Answers one reader after another, on the exporter's thread."""

    def __init__(self, listening: socket.socket, page: Callable[[], str], token: str) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.timeout = 0
        self.page, self.token = page, token

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a reader that goes away concerns no one."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _READER_S
    server: _Server
    server_version, sys_version = "tfscale", ""

    def do_GET(self) -> None:
        """Answer with the page of metrics, if the token is right."""
        credentials, token = self.headers.get("Authorization", ""), self.server.token
        # Headers are decoded as Latin-1, whatever bytes they are.
        right = f"Bearer {token}".encode()
        if token and not hmac.compare_digest(credentials.encode("latin-1", "replace"), right):
            self._answer(401, "The token is missing or wrong.\n", "text/plain")
        elif self.path.partition("?")[0] not in ("/metrics", "/"):
            self._answer(404, "The metrics are at /metrics.\n", "text/plain")
        else:
            self._answer(200, self.server.page(), CONTENT_TYPE)

    def _answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the output belongs to the training."""


class Exporter:
    """One thread that reads numbers once a second, serves them, and posts them.

    Training never waits for it: the thread reads what training leaves, and takes no lock of it.

    Args:
        read: Called on the thread for the present numbers; what it raises is logged.
        listening: Socket to serve at, see `listen`; None serves nothing.
        token: Bearer token that readers must send; "" for none.
        poster: Posts the numbers; None posts nothing.
    """

    def __init__(
        self,
        read: Callable[[], Numbers],
        listening: socket.socket | None = None,
        token: str = "",
        poster: Poster | None = None,
    ) -> None:
        self._read, self._poster = read, poster
        self._server = None if listening is None else _Server(listening, self._page, token)
        self._wakes, self._wake = os.pipe()
        self._is_over = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tfscale metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Post the last numbers if the server answers, and end the thread; for once."""
        if os.getpid() != self._process:  # a forked child has no such thread
            return
        self._is_over = True
        with contextlib.suppress(OSError):
            os.write(self._wake, b".")
        self._thread.join(_END_S if self._poster is not None else _TURN_S)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wakes, selectors.EVENT_READ)
        if self._server is not None:
            selector.register(self._server, selectors.EVENT_READ)
        while not self._is_over:
            ready = [key.fileobj for key, _ in selector.select(_TURN_S)]
            if self._server is not None and self._server in ready:
                self._server.handle_request()
            numbers = self._numbers()
            if self._poster is not None and numbers is not None and not self._is_over:
                self._poster.post(numbers)
        selector.close()
        if self._server is not None:
            self._server.server_close()
        numbers = self._numbers()
        if self._poster is not None and self._poster.is_answered and numbers is not None:
            self._poster.post(numbers, is_last=True)

    def _numbers(self) -> Numbers | None:
        try:
            return self._read()
        except Exception as error:  # the page must not end because of one number
            logger.debug("No metrics: %s", error)
            return None

    def _page(self) -> str:
        numbers = self._numbers()
        return "" if numbers is None else render(numbers)
