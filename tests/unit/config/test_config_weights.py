"""Weights against manifest and model.yml."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inventory_copy import Copy
from typer.testing import CliRunner

from mtp_runtime.cli.app import app

MakeCopy = Callable[[str], Copy]
CONFIG = {"num_hidden_layers": 20, "num_nextn_predict_layers": 1, "max_position_embeddings": 8192}


class Weights:
    """A weights folder of a copied `local` inventory, and the command that checks it."""

    def __init__(self, found: Copy, root: Path):
        self.found, self.root = found, root
        self.folder = root / "mtp_runtime/model/weights"
        self.folder.mkdir(parents=True)
        self.write({"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights" * 300_000})

    def write(self, files: dict[str, bytes]) -> None:
        """Writes files and the manifest that matches all of the folder."""
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        here = [p for p in self.folder.iterdir() if p.name != "manifest.json"]
        self.manifest({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in here})

    def manifest(self, files: Any) -> None:
        """Writes the manifest."""
        (self.folder / "manifest.json").write_text(json.dumps({"files": files}))

    def check(self) -> list[tuple[str, str]]:
        """(rule, key) of every problem."""
        words = ["weights", "local", "--json", "--root", str(self.root), "--inventories", str(self.found.root)]
        result = CliRunner().invoke(app, words)
        answer = json.loads(result.stdout)
        assert result.exit_code == (0 if answer["ok"] else 2), result.output
        return [(p["rule"], p["key"]) for p in answer["problems"]]


@pytest.fixture
def weights(copy: MakeCopy, tmp_path: Path) -> Weights:
    """Sound weights."""
    return Weights(copy("local"), tmp_path / "checkout")


def test_sound_weights(weights: Weights) -> None:
    assert weights.check() == []


def test_missing_weights(weights: Weights) -> None:
    (weights.folder / "model.safetensors").unlink()
    assert weights.check() == [("H02", "model.safetensors")]


def test_corrupted_weights(weights: Weights) -> None:
    content = bytearray((weights.folder / "model.safetensors").read_bytes())
    content[1_234_567] ^= 1
    (weights.folder / "model.safetensors").write_bytes(content)
    assert weights.check() == [("H03", "model.safetensors")]


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"files": {}}', '{"files": {"a": 1}}', "\x00"])
def test_unusable_manifest(text: str | None, weights: Weights) -> None:
    file = weights.folder / "manifest.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert weights.check() == [("H01", "model.manifest")]


def test_manifest_names_stay_in_the_folder(weights: Weights) -> None:
    weights.manifest({"../secret": "0" * 64})
    assert weights.check() == [("H01", "files.../secret")]


def test_model_without_mtp_layer(weights: Weights) -> None:
    weights.write({"config.json": json.dumps(CONFIG | {"num_nextn_predict_layers": 0}).encode()})
    assert weights.check() == [("H04", "num_nextn_predict_layers")]
    weights.found.edit({"mtp.enabled": False})
    assert weights.check() == []


def test_model_of_another_shape(weights: Weights) -> None:
    weights.write({"config.json": json.dumps(CONFIG | {"num_hidden_layers": 16}).encode()})
    assert weights.check() == [("H05", "num_hidden_layers")]


def test_quantisation_that_leaves_out_the_mtp_layer(weights: Weights) -> None:
    weights.found.edit({"model.quantization": "ascend"})
    assert weights.check() == [("R12", "quant_model_description.json")]
    weights.write({"quant_model_description.json": b'{"model.layers.19.mlp": "W8A8"}'})
    assert weights.check() == [("R12", "model.layers.20.*")]
    weights.write({"quant_model_description.json": b'{"model.layers.20.mlp": "W8A8"}'})
    assert weights.check() == []


def test_nothing_is_read_when_the_inventory_is_wrong(weights: Weights) -> None:
    weights.found.edit({"mtp.num_speculative_tokens": 16})
    assert weights.check() == [("R03", "mtp.num_speculative_tokens")]
