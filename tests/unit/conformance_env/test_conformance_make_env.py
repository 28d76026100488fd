"""Making the conformance environment where something is in its way. Nothing is installed: `make` is a stand-in."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "conformance" / "environment" / "make_env.py"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a module, for an environment and sources below tmp_path."""
    spec = importlib.util.spec_from_file_location("make_env", FILE)
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    lock = tmp_path / "lock.txt"
    lock.write_text("a==1\n")
    found.WHERE, found.LOCK, found.MADE_FROM = tmp_path / "local" / "env", lock, (lock,)
    found.PYTHON = found.WHERE / "bin" / "python"
    monkeypatch.delenv("MTP_CACHE", raising=False)
    return found


def making(env: ModuleType, ends: list[BaseException | None]) -> list[int]:
    """Makes of an environment that end so, in turn; grows by one with each."""
    calls: list[int] = []

    def make() -> None:
        env.WHERE.mkdir(parents=True, exist_ok=True)
        calls.append(len(calls))
        if (end := ends[len(calls) - 1]) is not None:
            raise end

    env.make = make
    return calls


def test_made_once_and_again_when_the_lock_changes(env: ModuleType) -> None:
    calls = making(env, [None, None])
    assert [env.main(), env.main()] == [0, 0] and len(calls) == 1
    env.LOCK.write_text("a==2\n")
    assert env.main() == 0 and len(calls) == 2


def test_interrupted_or_refused_it_is_made_again(env: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    calls = making(env, [KeyboardInterrupt(), env.Refused("no network"), None])
    with pytest.raises(KeyboardInterrupt):
        env.main()
    assert env.main() == 2 and "error: no network" in capsys.readouterr().err
    assert env.main() == 0 and len(calls) == 3


def test_a_lock_that_changes_meanwhile_is_not_what_it_was_made_from(env: ModuleType) -> None:
    calls = making(env, [None, None])
    first = env.make
    env.make = lambda: (first(), env.LOCK.write_text("a==2\n"))
    assert env.main() == 0
    env.make = first
    assert env.main() == 0 and len(calls) == 2


def test_of_two_at_once_one_makes_it(env: ModuleType) -> None:
    calls = making(env, [None, None])
    begun, go, first = threading.Event(), threading.Event(), env.make

    def slow() -> None:
        begun.set()
        assert go.wait(60)
        first()

    env.make = slow
    codes: list[int] = []
    runs = [threading.Thread(target=lambda: codes.append(env.main())) for _ in range(2)]
    runs[0].start()
    assert begun.wait(60)
    runs[1].start()
    go.set()
    for run in runs:
        run.join(60)
    assert codes == [0, 0] and calls == [0]


def test_nothing_is_lost_where_a_compiler_is_missing(
    env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    (env.WHERE / "kept").mkdir(parents=True)
    assert env.main() == 2 and "gcc, nm not found: install it" in capsys.readouterr().err
    assert (env.WHERE / "kept").exists()


def test_a_cache_that_cannot_be_written_is_said_first(
    env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is downloaded. Here a file stands in its place: nothing is forbidden to root."""
    monkeypatch.setattr(env.shutil, "which", lambda name: name)
    monkeypatch.setenv("MTP_CACHE", str(tmp_path / "lock.txt" / "cache"))
    (env.WHERE / "kept").mkdir(parents=True)
    assert env.main() == 2 and "cannot be written (Not a directory): name another folder" in capsys.readouterr().err
    assert (env.WHERE / "kept").exists()


def test_a_wheel_is_kept_whole(env: ModuleType, tmp_path: Path) -> None:
    """Again too, and nothing but it is left behind."""
    wheel, cache = tmp_path / "a.whl", tmp_path / "cache" / "made"
    for text in ("one", "two"):
        wheel.write_text(text)
        env.keep(wheel, cache)
        assert [path.name for path in cache.iterdir()] == ["a.whl"] and (cache / "a.whl").read_text() == text


def test_a_failed_command_is_told(env: ModuleType) -> None:
    with pytest.raises(env.Refused, match="failed:\nno network"):
        env.run(sys.executable, "-c", "raise SystemExit('no network')")
