"""locust as it is started for `make validate`, against a server that replays captured streams, whole or cut."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "monitoring" / "fixtures"
CAPTURES = {"/v1/completions": "completion.sse", "/v1/chat/completions": "chat.sse"}
KEY = "replay-key"


class Replay(ThreadingHTTPServer):
    """Sends the captured stream event by event, chunked; `keep` events of it, or all."""

    keep: int | None = None
    clean_end = True
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReplayHandler)
        self.bodies: list[dict[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up."""


class ReplayHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Replay

    def do_GET(self) -> None:
        ok = self.headers["Authorization"] == f"Bearer {KEY}"
        body = json.dumps({"data": [{"id": "tiny"}]} if ok else {"error": "Unauthorized"}).encode()
        self.send_response(200 if ok else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        events = [line for line in (FIXTURES / CAPTURES[self.path]).read_text(encoding="utf-8").splitlines() if line]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events[: self.server.keep]:
            data = f"{event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if self.server.clean_end:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def replay() -> Iterator[Replay]:
    server = Replay()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def load(replay: Replay, folder: Path, key: str = KEY, requests: int = 4) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, records and output of one locust run of two users."""
    where = {"host": "127.0.0.1", "port": replay.server_address[1]}
    plan = {
        "cluster": "replay",
        "mtp": {"enabled": True, "k": 1},
        "router": {"front": where, "metrics": where},
        "targets": {"vllm": [], "prometheus": where | {"scrape_interval_s": 5}, "exporter": where},
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "api_key").write_text(key, encoding="utf-8")
    result = folder / "result.json"
    command = [
        *(sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--only-summary"),
        *("--users", "2", "--spawn-rate", "2", "--run-time", "40s", "--exit-code-on-error", "0"),
        *("--plan", str(folder / "plan.json"), "--api-key-file", str(folder / "api_key")),
        *("--max-requests", str(requests), "--max-tokens", "12", "--result", str(result)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    records = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else []
    return done.returncode, records, done.stdout + done.stderr


def test_whole_streams_pass_and_the_run_ends_at_its_count(replay: Replay, tmp_path: Path) -> None:
    code, records, output = load(replay, tmp_path)
    assert code == 0, output
    assert [record["problem"] for record in records] == [None] * 4
    assert sorted(record["kind"] for record in records) == ["chat", "chat", "completion", "completion"]
    assert {(record["tokens"], record["usage_tokens"]) for record in records} == {(12, 12)}
    assert "TTFT" in output and "TPOT" in output
    assert len(replay.bodies) == 4
    assert all(body["stream"] and body["return_token_ids"] and body["model"] == "tiny" for body in replay.bodies)


def test_stream_that_ends_early_but_cleanly_is_failed(replay: Replay, tmp_path: Path) -> None:
    replay.keep = 5
    _, records, output = load(replay, tmp_path, requests=2)
    assert len(records) == 2, output
    assert all("without finish_reason" in record["problem"] for record in records)


def test_empty_200_is_failed(replay: Replay, tmp_path: Path) -> None:
    replay.keep = 0
    _, records, _ = load(replay, tmp_path, requests=2)
    assert [record["problem"] for record in records] == ["no token seen"] * 2


def test_connection_that_breaks_is_failed(replay: Replay, tmp_path: Path) -> None:
    replay.keep, replay.clean_end = 5, False
    _, records, _ = load(replay, tmp_path, requests=2)
    assert len(records) == 2
    assert all("connection broke" in record["problem"] for record in records)


def test_refused_key_stops_the_run(replay: Replay, tmp_path: Path) -> None:
    code, records, output = load(replay, tmp_path, key="wrong")
    assert code != 0
    assert records == []
    assert "401" in output
    assert replay.bodies == []
