"""Weights against their manifest and model.yml (H01..H05, R12). Reads files, changes nothing."""

import hashlib
import json
from pathlib import Path

from mtp_runtime.releases import MTP_METHODS

from .load import shown
from .model_config import CONFIG_FILE, read_json
from .problems import Problem
from .rules import get
from .schema import Cluster

CHUNK = 1 << 20


def check_weights(cluster: Cluster, root: Path) -> list[Problem]:
    """Everything wrong with the weights of a cluster. root: folder that relative paths start at."""
    folder = root / cluster.model.path
    problems: list[Problem] = []
    if cluster.model.manifest:
        problems += check_manifest(folder, root / cluster.model.manifest)
    elif not folder.is_dir():
        problems.append(_problem("H02", folder, "model.path", "the weights folder is missing."))
    if not problems:
        problems += _check_config(cluster, folder)
        problems += _check_quantization(cluster, folder)
    return problems


def check_manifest(folder: Path, manifest: Path) -> list[Problem]:
    """H01..H03."""
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        if not isinstance(files, dict) or not files or not all(isinstance(v, str) for v in files.values()):
            raise ValueError("files must map names to SHA-256 digests")
    except OSError as error:
        return [_problem("H01", manifest, "model.manifest", f"the manifest cannot be read: {error.strerror}.")]
    except (ValueError, KeyError, TypeError) as error:
        return [_problem("H01", manifest, "model.manifest", f"not a manifest: {type(error).__name__} {error}.")]
    problems = []
    for name, digest in sorted(files.items()):
        file = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(_problem("H01", manifest, f"files.{name}", "the name leaves the weights folder."))
        elif not file.is_file():
            problems.append(_problem("H02", file, name, "the file is missing."))
        elif (found := _sha256(file)) != digest.lower():
            problems.append(_problem("H03", file, name, f"SHA-256 is {found}, the manifest says {digest}."))
    return problems


def _check_config(cluster: Cluster, folder: Path) -> list[Problem]:
    """H04, H05."""
    file = folder / CONFIG_FILE
    config = read_json(file)
    if not isinstance(config, dict):
        return [_problem("H02", file, CONFIG_FILE, "the file is missing or is no JSON object.")]
    problems = []
    mtp_layers = config.get("num_nextn_predict_layers") or 0
    if cluster.mtp.enabled and cluster.mtp.method in MTP_METHODS and mtp_layers < 1:
        problems.append(_problem("H04", file, "num_nextn_predict_layers", "the model has no MTP layer, but MTP is on."))
    for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        stated, real = getattr(cluster.model, key), config.get(key)
        if stated is not None and real is not None and stated != real:
            problems.append(_problem("H05", file, key, f"config.json says {real}, model.yml says {stated}."))
    return problems


def _check_quantization(cluster: Cluster, folder: Path) -> list[Problem]:
    """R12: the description covers the MTP layer's keys (layer number = main layers)."""
    if cluster.model.quantization != "ascend":
        return []
    file = folder / "quant_model_description.json"
    description = read_json(file)
    if not isinstance(description, dict):
        return [_problem("R12", file, file.name, "the file is missing or is no JSON object.")]
    config = read_json(folder / CONFIG_FILE)
    layers = cluster.model.num_hidden_layers or (config.get("num_hidden_layers") if isinstance(config, dict) else None)
    prefix = f"model.layers.{layers}."
    uses_layer = cluster.mtp.enabled and cluster.mtp.method in MTP_METHODS
    if uses_layer and not any(key.startswith(prefix) for key in description):
        return [_problem("R12", file, prefix + "*", "the MTP layer is not described, but MTP is on.")]
    return []


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _problem(rule: str, file: Path, key: str, message: str) -> Problem:
    return Problem(rule, shown(file), key, message, get(rule).remedy, source=get(rule).source)
