"""Slack slots or placeholder drafts for a request's first step after the hand-off: which is cheaper, and why.

The unit is a token-row a step: one query token through the target at a full batch of R requests, d = K + 1.

- slack: the graph has S slots more (`slots.slots_for`), so S d rows more in *every* step;
- placeholder: K certain-to-be-rejected drafts, once a request. A request lives for L steps, so a full batch has R / L
  new ones a step: R K / L rows.

    placeholder is cheaper where R K / L < S d, so above L* = R K / (S d) steps.

S >= R K / (15 - K), hence L* <= (15 - K) / (K + 1): 7 steps at K = 1, 4.3 at K = 2, 3 at K = 3, 1 at K = 7, less than 1
from K = 8 on, where slack never pays because a request lives for one step at least; K = 15 has no slack at all. With
R K / (15 - K) not whole, L* is lower still: 4 steps for R = 16, K = 1.

What the unit leaves out favours placeholders. A whole graph computes its R d rows whatever they hold, so a placeholder
really adds only what a padding row (KV length 0) is spared: attention over the request's KV, the output head,
verification. A full row is its price where attention costs as much as the rest of the model: at about 4,400 tokens of
context for DeepSeek-V3 (attention 2 x 128 heads x (576 + 512) x 61 layers = 17 MFLOP for each of them, the rest
2 x 37e9 FLOP). With shorter contexts it is less, and L* lower. And a partly filled batch with one fresh request can
need the next larger slack graph, where the placeholder graph still fits. So a placeholder that is chosen here is
cheaper up to that context; slack remains for answers of a few tokens, and where placeholders cannot be used.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mtp_runtime.graphs.slots import MAX_K, MAX_SLACK_K, PLACEHOLDER, SLACK, SlotsError, check_limits, slots_for

# The workload that is expected where nobody says better: answers of 256 tokens, and 85 % of the drafts accepted whose
# predecessors were (DeepSeek-V3 report, 2412.19437: 85 to 90 % for the second token).
ANSWER_TOKENS: Final = 256.0
ACCEPTANCE: Final = 0.85


class Choice(NamedTuple):
    """padding: SLACK or PLACEHOLDER; why: half a sentence for people.

    slack_rows, placeholder_rows: token-rows a step that each costs; crossover_steps: L*, the decode steps of a request
    above which placeholders are cheaper. slack_rows and crossover_steps are None where no slack is enough (K = 15).
    """

    padding: str
    why: str
    slack_rows: int | None
    placeholder_rows: float
    crossover_steps: float | None


def choose_padding(
    requests: int, k: int, answer_tokens: float = ANSWER_TOKENS, acceptance_length: float | None = None
) -> Choice:
    """The cheaper padding for a full batch of `requests` requests with K drafts a step (formula: module).

    answer_tokens: mean tokens of an answer, 1 or more; acceptance_length: mean tokens a step, 1..K+1
    (`expected_acceptance_length` when None). At the crossover it is placeholder, whose graph is smaller.
    Raises SlotsError for requests < 1, K outside 1..15, and a workload outside these limits.
    """
    check_limits(requests, k)
    if k < 1:
        raise SlotsError("K = 0: without drafts there is nothing to pad", f"use K from 1 to {MAX_K}")
    steps = decode_steps(
        answer_tokens, expected_acceptance_length(k) if acceptance_length is None else acceptance_length, k
    )
    placeholder = requests * k / steps
    if k > MAX_SLACK_K:
        return Choice(PLACEHOLDER, f"K = {k}: no number of slack slots is enough", None, placeholder, None)
    slack = slots_for(requests, k).slack_slots * (k + 1)
    crossover = requests * k / slack
    padding = SLACK if slack < placeholder else PLACEHOLDER
    why = (
        f"a request lives for {steps:.1f} steps, crossover {crossover:.1f}: "
        f"token-rows a step are {slack} with slack, {placeholder:.1f} with placeholders"
    )
    return Choice(padding, why, slack, placeholder, crossover)


def expected_acceptance_length(k: int) -> float:
    """Tokens a step with K drafts when ACCEPTANCE of those are accepted whose predecessors were: 1 + a + ... + a^K."""
    return sum(ACCEPTANCE**n for n in range(k + 1))


def decode_steps(answer_tokens: float, acceptance_length: float, k: int) -> float:
    """L, decode steps of a request: the first yields one token with either padding, the others acceptance_length each.

    Raises SlotsError for less than one token, and for an acceptance length outside 1..K+1.
    """
    if not answer_tokens >= 1:
        raise SlotsError(f"answers of {answer_tokens:g} tokens", "use 1 token or more")
    if not 1 <= acceptance_length <= k + 1:
        raise SlotsError(
            f"acceptance length {acceptance_length:g}: a step with K = {k} drafts yields 1 to {k + 1} tokens",
            f"use a length from 1 to {k + 1}",
        )
    return 1 + (answer_tokens - 1) / acceptance_length
