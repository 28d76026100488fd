"""`mtpctl active-k` against servers that answer as a rank's endpoint does, and as broken ones do."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mtp_runtime.cli import main
from mtp_runtime.cli.active_k import PATH
from mtp_runtime.cli.deployed import Deployed
from mtp_runtime.metrics.plan import Engine, Plan

KEY = "the-key"


class Server(ThreadingHTTPServer):
    """One rank. sets_left: POSTs it takes before it fails as `failure` says."""

    def __init__(self, active: int, loaded: int, sets_left: int = 99, failure: str = "error") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.active, self.loaded, self.sets_left, self.failure = active, loaded, sets_left, failure
        self.asked: list[tuple[str, Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        rank = self.server
        rank.asked.append((self.command, body))
        if self.path != PATH:
            self._send(404, {"detail": "Not Found"})
        elif self.headers["Authorization"] != f"Bearer {KEY}":
            self._send(401, {"error": "Unauthorized"})
        elif not rank.loaded:
            self._send(409, {"error": {"message": "MTP is off"}})
        elif body is not None and rank.sets_left <= 0:
            if rank.failure == "error":
                self._send(500, {"error": {"message": "the engine is dead"}})
            else:  # heard, but the answer is lost
                rank.active = body["active_k"]
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            if body is not None:
                rank.sets_left -= 1
                rank.active = body["active_k"]
            self._send(200, {"active_k": rank.active, "loaded_k": rank.loaded})

    def _send(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: Any) -> None:
        pass


Cluster = Callable[..., list[Server]]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Makes the given servers the decode ranks of the cluster `local`, beside a prefill rank that nobody may ask."""
    started: list[Server] = []

    def deploy(*servers: Server) -> list[Server]:
        started.extend(servers)
        engines = [Engine(server.url, "decode", f"decode-{number}") for number, server in enumerate(servers)]
        engines.append(Engine("http://127.0.0.1:1", "prefill", "prefill-0"))
        plan = Plan("local", True, 3, tuple(engines), "f:1", "m:1", "p:1", "e:1", 5)
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "api_key").write_text(f"{KEY}\n")
        monkeypatch.setattr(main.Deployed, "find", lambda name: Deployed(tmp_path, plan, "model", tmp_path))
        return list(servers)

    yield deploy
    for server in started:
        server.shutdown()
        server.server_close()


def mtpctl(*words: str) -> Result:
    return CliRunner().invoke(main.app, ["active-k", "local", *words])


def rows(result: Result) -> list[list[str]]:
    """Cells of the printed table."""
    lines = [line for line in result.stdout.splitlines() if "decode-" in line]
    return [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]


def sets(server: Server) -> list[int]:
    return [body["active_k"] for method, body in server.asked if method == "POST"]


def test_it_shows_every_rank_and_changes_nothing(cluster: Cluster) -> None:
    ranks = cluster(Server(2, 3), Server(3, 3))
    result = mtpctl()
    assert result.exit_code == 0, result.output
    assert rows(result) == [["decode-0", "2", "3"], ["decode-1", "3", "3"]]
    assert [sets(rank) for rank in ranks] == [[], []]


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_it_sets_every_rank(cluster: Cluster, wanted: int) -> None:
    ranks = cluster(Server(2, 3), Server(3, 3))
    result = mtpctl(str(wanted))
    assert result.exit_code == 0, result.output
    assert [rank.active for rank in ranks] == [wanted, wanted]
    assert [row[1] for row in rows(result)] == [str(wanted)] * 2


def test_json(cluster: Cluster) -> None:
    cluster(Server(2, 3))
    found = json.loads(mtpctl("1", "--json").stdout)
    assert found == {
        "cluster": "local",
        "ok": True,
        "ranks": [{"instance": "decode-0", "active_k": 1, "loaded_k": 3, "trouble": None}],
        "refused": None,
        "failed": None,
    }


@pytest.mark.parametrize("wanted", ["4", "2", "99999999999999999999"])
def test_more_than_one_rank_has_loaded_is_bad_input(cluster: Cluster, wanted: str) -> None:
    ranks = cluster(Server(1, 3), Server(1, 1))
    result = mtpctl(wanted)
    assert result.exit_code == 2, result.output
    assert "use 0 to 1" in result.stderr
    assert [sets(rank) for rank in ranks] == [[], []]


@pytest.mark.parametrize("wanted", ["x", "1.5", "-1", ""])
def test_what_is_no_number_is_bad_input(cluster: Cluster, wanted: str) -> None:
    ranks = cluster(Server(1, 3))
    assert mtpctl(wanted).exit_code == 2
    assert ranks[0].asked == []


def test_a_negative_number_that_click_lets_through_is_bad_input(cluster: Cluster) -> None:
    ranks = cluster(Server(1, 3))
    result = mtpctl("--", "-1")
    assert result.exit_code == 2 and "use 0 to 3" in result.stderr
    assert sets(ranks[0]) == []


def test_without_mtp_it_says_so(cluster: Cluster) -> None:
    cluster(Server(0, 0))
    shown, refused = mtpctl(), mtpctl("0")
    assert (shown.exit_code, rows(shown)[0][2]) == (0, "MTP is off")
    assert refused.exit_code == 2 and "MTP is off" in refused.stderr


def test_nothing_is_changed_while_a_rank_does_not_answer(cluster: Cluster) -> None:
    ranks = cluster(Server(3, 3), Server(3, 3))
    ranks[1].shutdown()
    ranks[1].server_close()
    shown, result = mtpctl(), mtpctl("0")
    assert (shown.exit_code, rows(shown)) == (1, [["decode-0", "3", "3"], ["decode-1", "?", "?"]])
    assert result.exit_code == 1
    assert "decode-1: no answer" in result.stderr and "nothing was changed" in result.stderr
    assert sets(ranks[0]) == []


def test_nothing_is_changed_with_a_wrong_key(cluster: Cluster, tmp_path: Path) -> None:
    ranks = cluster(Server(3, 3))
    (tmp_path / "secrets" / "api_key").write_text("another")
    result = mtpctl("0")
    assert result.exit_code == 1 and "HTTP 401" in result.stderr
    assert ranks[0].active == 3


@pytest.mark.parametrize("failure", ["error", "lost answer"])
def test_a_rank_that_fails_midway_sets_the_others_back(cluster: Cluster, failure: str) -> None:
    ranks = cluster(Server(2, 3), Server(3, 3, 0, failure), Server(1, 3))
    result = mtpctl("0", "--json")
    assert result.exit_code == 1
    assert "decode-1" in result.stderr and "the others are set back" in result.stderr
    assert sets(ranks[0]) == [0, 2] and ranks[0].active == 2
    assert ranks[1].active == 3
    assert sets(ranks[2]) == []
    assert [rank["active_k"] for rank in json.loads(result.stdout)["ranks"]][::2] == [2, 1]


def test_a_rank_that_cannot_be_set_back_is_named(cluster: Cluster) -> None:
    cluster(Server(2, 3, 1), Server(3, 3, 0))
    result = mtpctl("0")
    assert result.exit_code == 1
    assert "not set back: decode-0, decode-1" in result.stderr


@pytest.mark.parametrize(
    ("active", "said"),
    [((2, 2), "active K = 2;"), ((0, 3), "active K = 0 on decode-0, 3 on decode-1;")],
)
def test_status_says_how_many_drafts_the_running_servers_make(
    active: tuple[int, int], said: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deployed, "programs", lambda self: [])
    monkeypatch.setattr(Deployed, "names", lambda: ["local"])
    ranks = cluster(*(Server(k, 3) for k in active))
    assert f"MTP on, K = 3, {said}" in CliRunner().invoke(main.app, ["status"]).stdout
    ranks[1].shutdown()
    ranks[1].server_close()
    shown = CliRunner().invoke(main.app, ["status", "local"]).stdout
    assert f"MTP on, K = 3, active K = {active[0]} on decode-0, ? on decode-1;" in shown
