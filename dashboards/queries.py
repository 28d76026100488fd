"""The PromQL of the dashboard, built from the metric names of `mtp_runtime.metrics.names`.

`$__rate_interval` and `$engine_instance` are Grafana's to fill in. Windows are `rate()` over the raw counters; the
figures since server start come from the exporter.
"""

from __future__ import annotations

from mtp_runtime.metrics import names

WINDOW = "[$__rate_interval]"
_INSTANCE = f'{names.LABEL_INSTANCE}=~"$engine_instance"'
_ROLES = "|".join(sorted(names.DECODING_ROLES))
EVERY = f'{{job="{names.JOB_VLLM}",{_INSTANCE}}}'
DECODING = f'{{job="{names.JOB_VLLM}",{names.LABEL_ROLE}=~"{_ROLES}",{_INSTANCE}}}'
OURS = f"{{{_INSTANCE}}}"


def with_label(selector: str, label: str, value: str) -> str:
    """`selector` narrowed by one more label."""
    return f'{selector.removesuffix("}")},{label}="{value}"}}'


def total(expression: str, *labels: str) -> str:
    """Sum by engine instance and further labels."""
    return f"sum by ({', '.join((names.LABEL_INSTANCE, *labels))}) ({expression})"


def rate(metric: str, selector: str, *labels: str) -> str:
    """Growth per second, summed by engine instance and further labels."""
    return total(f"rate({metric}{selector}{WINDOW})", *labels)


def mean(histogram: str, selector: str) -> str:
    """Mean of a histogram's observations in the window."""
    return f"{rate(f'{histogram}_sum', selector)} / {rate(f'{histogram}_count', selector)}"


def quantile(share: float, histogram: str, selector: str) -> str:
    """A quantile of a histogram's observations in the window."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', selector, 'le')})"


def draft_steps() -> str:
    """Placeholder drafts are not in these counters: the plugin keeps them out."""
    return rate(names.SPEC_DRAFTS, DECODING)


def draft_tokens() -> str:
    return rate(names.SPEC_DRAFT_TOKENS, DECODING)


def acceptance_rate() -> str:
    """Accepted draft tokens / draft tokens."""
    return f"{rate(names.SPEC_ACCEPTED_TOKENS, DECODING)} / {draft_tokens()}"


def acceptance_length() -> str:
    """1 + accepted draft tokens / draft steps."""
    return f"1 + {rate(names.SPEC_ACCEPTED_TOKENS, DECODING)} / {draft_steps()}"


def acceptance_by_position() -> str:
    """For each draft position, accepted / draft steps."""
    accepted = rate(names.SPEC_ACCEPTED_PER_POSITION, DECODING, names.LABEL_POSITION)
    return f"{accepted} / on ({names.LABEL_INSTANCE}) group_left () {draft_steps()}"


def tpot() -> str:
    """Mean time per output token; requests of one token, which vLLM observes as 0, are left out."""
    one_token = rate(f"{names.REQUEST_GENERATION_TOKENS}_bucket", with_label(DECODING, "le", "1.0"))
    seconds = rate(f"{names.TIME_PER_OUTPUT_TOKEN}_sum", DECODING)
    return f"{seconds} / ({rate(f'{names.TIME_PER_OUTPUT_TOKEN}_count', DECODING)} - {one_token})"


def router_rate(pd_metric: str, plain_metric: str) -> str:
    """Router rate by route; its counters have other names with and without prefill/decode."""
    return " or ".join(f"sum by (route) (rate({metric}{WINDOW}))" for metric in (pd_metric, plain_metric))


def router_mean(pd_histogram: str, plain_histogram: str) -> str:
    """Mean seconds of a router request by route."""
    return " or ".join(
        f"sum by (route) (rate({name}_sum{WINDOW})) / sum by (route) (rate({name}_count{WINDOW}))"
        for name in (pd_histogram, plain_histogram)
    )
