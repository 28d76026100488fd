"""Changes one value of mtp.yml and keeps everything else of the file, comments included."""

import io
import json
import os
import re
import tempfile
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from .api import Checked, check, inventories, load_checked
from .load import VARS_FOLDER, load
from .schema import Cluster


def check_with_k(name: str, k: int | None, root: Path | None = None) -> Checked:
    """The cluster as it would be with another K, which is written nowhere; None: as it is. Errors: ConfigError."""
    return check(name, root, None if k is None else {"mtp": with_k(_text(name, root), k)})


def set_k(name: str, k: int, root: Path | None = None) -> tuple[Cluster, bool]:
    """Writes K into a cluster's mtp.yml; returns the new cluster and whether the file changed.

    K = 0 sets enabled: false and leaves num_speculative_tokens, so that switching on again finds the old value.
    Errors: ConfigError, before anything is written, when the new file would break a rule.
    """
    old = _text(name, root)
    new = with_k(old, k)
    cluster = load_checked(name, root, {"mtp": new})
    if new != old:
        replace(_file(name, root), new)
    return cluster, new != old


def _file(name: str, root: Path | None) -> Path:
    return (root or inventories()) / name / VARS_FOLDER / "mtp.yml"


def _text(name: str, root: Path | None) -> str:
    """mtp.yml. The files must be readable and typed, but may break a rule: setting K may be what repairs them."""
    load((root or inventories()) / name)
    return _file(name, root).read_text(encoding="utf-8")


def with_k(text: str, k: int) -> str:
    """mtp.yml's text with another K; the same text when nothing changes."""
    mtp = YAML(typ="rt").load(text)["mtp"]
    wanted: dict[str, bool | int] = {"enabled": k != 0}
    if k:
        wanted["num_speculative_tokens"] = k
    lines = text.splitlines(keepends=True)
    for key, value in wanted.items():
        if mtp.get(key) == value and isinstance(mtp.get(key), bool) == isinstance(value, bool):
            continue
        if not _rewrite(lines, mtp, key, json.dumps(value)):
            return _dumped(text, wanted)
    edited = "".join(lines)
    # The edit is by position in the text: believe it only when it reads back as meant.
    expected = {**YAML(typ="safe").load(text)["mtp"], **wanted}
    try:
        same = YAML(typ="safe").load(edited) == {"mtp": expected}
    except YAMLError:
        same = False
    return edited if same else _dumped(text, wanted)


def _rewrite(lines: list[str], mtp: CommentedMap, key: str, value: str) -> bool:
    """Puts a plain scalar in the place of another, in `lines`. False when the key is not written there."""
    if key not in (mtp.lc.data or {}):
        return False
    line, column = mtp.lc.value(key)
    head, tail = lines[line][:column], lines[line][column:]
    lines[line] = head + re.sub(r"^[^\s,#}\]]+", value, tail, count=1)
    return True


def _dumped(text: str, wanted: dict[str, bool | int]) -> str:
    """For unusual files (merges, odd scalars): written anew by the YAML library, comments kept, spacing maybe not."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 4096
    data = yaml.load(text)
    data["mtp"].update(wanted)
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def replace(file: Path, text: str) -> None:
    """Replaces a file in one step: a reader sees the old or the new text, never half of one. Keeps the mode."""
    mode = file.stat().st_mode & 0o7777
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
