"""docs/model.md, written by `python -m mtp_runtime.model quality --report docs/model.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from string import Template

from tokenizers import Tokenizer

from mtp_runtime.model import export, grammar, heldout
from mtp_runtime.model.arch import Config
from mtp_runtime.model.limits import LIMITS
from mtp_runtime.model.mtp_layer import DeepseekV3
from mtp_runtime.model.quality import NEW_TOKENS, Quality, parses
from mtp_runtime.model.recipe import Recipe

SAMPLES = 20

_PAGE = Template("""# The tiny model

Written by `python -m mtp_runtime.model quality --report docs/model.md` (engine environment); do not edit.

A true DeepSeek-V3 architecture, deep and thin: $layers layers of hidden size $hidden, $heads heads, MLA with a latent
of $latent and $rope rotary dimensions, $experts routed experts (top $top, noaux_tc, groups) and a shared one, YaRN to
$context positions, one MTP layer that shares embedding and head through `eh_proj`. $parameters parameters, bfloat16,
vocabulary $vocab (byte-level BPE trained with it).

It writes the books of small towns, and nothing else: text drawn from the probabilistic grammar of
`mtp_runtime/model/grammar.py`. A book looks like this:

```text
$book
```

The weather, the seller and the place of a day follow from those of the day before (two or three successors each),
trades, goods and pronouns agree, every sum comes out right. A chat asks for a book; the answer is its days.

## Training

`make model` ($steps steps, $books books; resumes from `.local/model/checkpoint.pt`; same limits, not same hash).
Loss: cross entropy of the main model plus $weight times the mean of the cross entropies of the MTP depths; at every
depth the MTP layer attends to what an engine's one KV cache would hold. Stages:

| Steps | Layers | Tokens of each book | Books a step | MTP depths |
|---|---|---|---|---|
$stages

Layers are added by growth: new ones add nothing at first, so the grown model computes what the small one did.

## Quality

$prompts held-out prompts of 40 to 200 tokens, none of which shares 20 tokens in a row with what training showed;
greedy completions of up to $new tokens by the float32 reference, which agrees with transformers to 1e-4 in the logits.
`tests/engine/test_shipped_weights.py` holds the shipped weights to the limits.

| | Measured | Limit |
|---|---|---|
$figures

perplexity_ratio: the model's perplexity over the grammar's own, on the whole books that the prompts begin.
acceptance_k1_sampled: the expected share of accepted one-hot drafts at temperature 1, on the same books.

## $samples samples (prompt, a line, greedy completion)

$texts""")


def page(model: DeepseekV3, tokenizer: Tokenizer, found: Quality, prompts: Sequence[heldout.Prompt],
         completions: Sequence[list[int]]) -> str:  # fmt: skip
    """The whole page as Markdown."""
    c: Config = model.c
    recipe = Recipe()
    values = asdict(found)
    stages = "\n".join(f"| {s.steps} | {s.layers} | {s.length} | {s.batch} | {s.depths} |" for s in recipe.stages)
    figures = "\n".join(
        f"| {name} | {values[name]:.3f} | {LIMITS.get(name, ('reported', None))[0]} |" for name in values
    )
    rows = list(zip(prompts, completions, strict=True))[:SAMPLES]
    return _PAGE.substitute(
        layers=c.num_hidden_layers, hidden=c.hidden_size, heads=c.num_attention_heads, latent=c.kv_lora_rank,
        rope=c.qk_rope_head_dim, experts=c.n_routed_experts, top=c.num_experts_per_tok, vocab=c.vocab_size,
        context=c.max_position_embeddings, parameters=f"{export.parameters(model):,}", stages=stages, figures=figures,
        book="\n".join(grammar.generate("example", False)[0].splitlines()[:4]) + "\n...", steps=recipe.steps,
        books=recipe.books, weight=recipe.mtp_weight, prompts=len(prompts), new=NEW_TOKENS, samples=len(rows),
        texts="\n".join(_sample(tokenizer, n, *row) for n, row in enumerate(rows, 1)),
    )  # fmt: skip


def _sample(tokenizer: Tokenizer, number: int, prompt: heldout.Prompt, completion: list[int]) -> str:
    verdict = "grammatical" if parses(tokenizer, prompt, completion) else "**not** grammatical"
    asked = tokenizer.decode(list(prompt.ids), skip_special_tokens=False)
    told = tokenizer.decode(completion, skip_special_tokens=False)
    return f"{number} ({verdict}):\n\n```text\n{asked}\n-----\n{told}\n```\n"
