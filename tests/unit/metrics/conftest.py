"""Captured scrapes and a plain HTTP server that hands them out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from metrics_captures import FIXTURES, Serve


@pytest.fixture
def decode_text() -> str:
    return (FIXTURES / "decode_k1.prom").read_text(encoding="utf-8")


@pytest.fixture
def prefill_text() -> str:
    return (FIXTURES / "prefill_k1.prom").read_text(encoding="utf-8")


@pytest.fixture
def without_mtp(decode_text: str) -> str:
    """The same scrape as a server without a speculative config would give it: vLLM has no such counters then."""
    return "".join(line for line in decode_text.splitlines(keepends=True) if "spec_decode" not in line)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers every GET with the given text; returns its base address."""
    servers: list[ThreadingHTTPServer] = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
