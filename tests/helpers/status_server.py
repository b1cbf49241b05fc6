"""A stand-in for the server to which a Kubeflow TrainJob posts its status, with HTTPS."""

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.certificates import Certificate
from tfscale.monitor.kubeflow import StatusServer

PREFIX = "KUBEFLOW_TRAINER_STATUS_SERVER_"


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted; answers with the status of its server."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, self.headers["Authorization"], json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(self.server.answer)  # type: ignore[attr-defined]
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class Server(http.server.HTTPServer):
    """Attributes: `posts` (path, authorization, body), `answer`, and what names the server."""

    def __init__(self, certificate: Certificate, token: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.posts: list[tuple[str, str, dict[str, Any]]] = []
        self.answer = 200
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.chain, certificate.key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        names = {
            "URL": f"https://127.0.0.1:{self.server_port}/trainjobs/a/status",
            "CA_CERT": str(certificate.chain),
            "TOKEN": str(token),
        }
        self.variables = {PREFIX + name: value for name, value in names.items()}
        self.target = StatusServer.of(self.variables)


@contextlib.contextmanager
def status_server(certificate: Certificate, token: Path) -> Iterator[Server]:
    """Serve within a block."""
    server = Server(certificate, token)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
