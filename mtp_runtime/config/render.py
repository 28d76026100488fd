"""Checked cluster -> plan: what every process is started with and what is scraped. Pure, machine-independent."""

from typing import Any, NamedTuple

from mtp_runtime import releases
from mtp_runtime.choice import PROBABILISTIC, choose_method

from .checks import decoding_roles
from .engines import ENGINE_PYTHON, rank_command
from .graph_plan import capture_sizes, full_slots, graph_mode, padding
from .placement import Rank, place
from .ports import Listener, listeners
from .problems import dotted
from .schema import Cluster


def render(cluster: Cluster) -> dict[str, Any]:
    """The plan, ready for JSON. The cluster must have passed the rules.

    ranks: one entry an engine process (argv, env; paths with `{root}`, Python as `{engine_python}`); router; targets;
    verification, padding: method (null with MTP off) and why; graphs: mode (null: the engine chooses), slots of a full
    step (null: unknown) and sizes in query tokens. These are of the ranks that decode. deployable: ok, and why or why
    not; runner: what keeps a rank running.
    """
    ranks = place(cluster)
    mtp, model = cluster.mtp, cluster.model
    # Rule R31: either decode or single.
    (decoder,) = decoding_roles(cluster)
    return {
        "cluster": cluster.name,
        "engine": cluster.topology.engine,
        "release": cluster.topology.release,
        "deployable": deployable(cluster)._asdict(),
        "runner": cluster.runner(),
        "model": {"name": model.name, "path": model.path, "manifest": model.manifest},
        "mtp": {
            "enabled": mtp.enabled,
            "k": mtp.k if mtp.enabled else 0,
            "method": mtp.method,
            "verification": mtp.verification,
            "draft_sampling": mtp.draft_sampling,
            "attention": mtp.attention,
            "padding": mtp.padding,
        },
        "verification": _verification(cluster),
        "padding": padding(cluster, decoder)._asdict(),
        "graphs": {
            "mode": graph_mode(cluster, decoder),
            "slots": full_slots(cluster, decoder),
            "capture_sizes": capture_sizes(cluster, decoder),
        },
        "ranks": [_rank(cluster, rank) for rank in ranks],
        "router": _router(cluster, ranks),
        "targets": _targets(cluster, ranks),
        "listeners": [_listener(cluster, found) for found in listeners(cluster, ranks)],
    }


class Deployable(NamedTuple):
    """ok: this project has a runtime for the release line; why: a sentence with file and key when it has none."""

    ok: bool
    why: str


def deployable(cluster: Cluster) -> Deployable:
    """May `make deploy` go on?"""
    topology = cluster.topology
    found = releases.find(topology.engine, topology.release)
    assert found is not None  # rule R33
    if found.deployable:
        return Deployable(True, f"{found.line} has a runtime here")
    where = f"ansible/inventories/{cluster.name}/group_vars/all/topology.yml: topology.release"
    return Deployable(False, f"{where}: {found.rendered_only}")


def _verification(cluster: Cluster) -> dict[str, str | None]:
    """Which method decides about the drafts of D and single."""
    mtp = cluster.mtp
    if not mtp.enabled:
        return {"method": None, "why": "MTP is off, there are no drafts"}
    has_draft_probs = mtp.draft_sampling == PROBABILISTIC
    return choose_method(mtp.verification, has_draft_probs, mtp.k)._asdict()


def url(address: str, port: int) -> str:
    """http URL; IPv6 addresses get their brackets."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def _rank(cluster: Cluster, rank: Rank) -> dict[str, Any]:
    argv, env = rank_command(cluster, rank)
    return {
        "name": rank.name,
        "role": rank.role,
        "host": rank.host,
        "group": rank.group,
        "rank": rank.rank,
        "address": rank.address,
        "port": rank.port,
        "url": url(rank.address, rank.port),
        "k": cluster.draft_tokens(rank.role),
        "argv": argv,
        "env": dict(sorted(env.items())),
    }


def _router(cluster: Cluster, ranks: list[Rank]) -> dict[str, Any]:
    """vllm-router behind the front: the router does not check client keys in P/D mode, so it stays on loopback."""
    router = cluster.serving.router
    argv = [ENGINE_PYTHON, "-m", "vllm_router.launch_router"]
    argv += ["--host", router.backend_host, "--port", str(router.backend_port), "--policy", router.policy]
    if any(rank.role == "decode" for rank in ranks):
        argv += ["--vllm-pd-disaggregation"]
        for rank in ranks:
            target = url(rank.address, rank.port)
            argv += ["--prefill", target, "none"] if rank.role == "prefill" else ["--decode", target]
        argv += ["--kv-connector", releases.ROUTER_CONNECTOR[cluster.topology.connector or "NixlConnector"]]
    else:
        argv += ["--worker-urls", *(url(rank.address, rank.port) for rank in ranks)]
    argv += ["--prometheus-host", router.metrics_host, "--prometheus-port", str(router.metrics_port)]
    # One failed check takes a dead worker out: new requests must not wait for it.
    argv += ["--health-check-interval-secs", str(router.health_check_interval_s)]
    argv += ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
    argv += ["--request-timeout-secs", str(router.request_timeout_s)]
    argv += ["--worker-startup-timeout-secs", str(router.worker_startup_timeout_s)]
    # The router's own interval is 30 s: up to half a minute of waiting for engines that are ready.
    argv += ["--worker-startup-check-interval", "1"]
    hosts = cluster.host_names("router")
    return {
        "host": hosts[0] if hosts else None,
        "argv": argv,
        "env": {},
        "front": {"host": router.host, "port": router.port},
        "backend": {"host": router.backend_host, "port": router.backend_port},
        "metrics": {"host": router.metrics_host, "port": router.metrics_port},
    }


def _listener(cluster: Cluster, found: Listener) -> dict[str, Any]:
    """One socket, with the file and key that choose its port: for the check that nobody else holds it (H10)."""
    section, *rest = found.key
    inventory = f"ansible/inventories/{cluster.name}"
    in_hosts = section == "hosts"
    return {
        "host": found.host,
        "address": found.address,
        "port": found.port,
        "owner": found.owner,
        "file": f"{inventory}/hosts.yml" if in_hosts else f"{inventory}/group_vars/all/{section}.yml",
        "key": dotted(tuple(rest) if in_hosts else found.key),
    }


def _targets(cluster: Cluster, ranks: list[Rank]) -> dict[str, Any]:
    """What Prometheus and the exporter look at."""
    monitoring, router = cluster.monitoring, cluster.serving.router
    return {
        "prometheus": {
            "host": monitoring.host,
            "port": monitoring.prometheus_port,
            "scrape_interval_s": monitoring.scrape_interval_s,
            "retention_days": monitoring.retention_days,
        },
        "vllm": [{"url": url(rank.address, rank.port), "role": rank.role, "instance": rank.name} for rank in ranks],
        "router": url(router.metrics_host, router.metrics_port),
        "exporter": {"host": monitoring.host, "port": monitoring.exporter_port},
    }
