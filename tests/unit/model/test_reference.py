"""Our plain DeepSeek-V3 against transformers' own, and the MTP layer against an independent forward pass."""

import pytest

torch = pytest.importorskip("torch", reason="needs the engine environment")
transformers = pytest.importorskip("transformers", reason="needs the engine environment")

from mtp_runtime.model import data, decode, export  # noqa: E402
from mtp_runtime.model import tokenizer as tok  # noqa: E402
from mtp_runtime.model.arch import Config, rope_table  # noqa: E402
from mtp_runtime.model.mtp_layer import DeepseekV3, initialise  # noqa: E402

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["random", "shipped"])
def pair(request, tmp_path_factory):
    """(our model, transformers' model) with the same weights: random ones and the shipped ones."""
    if request.param == "shipped":
        folder = export.WEIGHTS
    else:
        folder = tmp_path_factory.mktemp("random")
        tokenizer = data.train_tokenizer()
        model = DeepseekV3(Config(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=4))
        initialise(model, 1)
        export.save(model, tokenizer, folder)
    ours, tokenizer = export.load(folder)
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tok.encode_book(tokenizer, data.book_text("held-out", i)[0], False)[:300] for i in (0, 1)])
    return ours, theirs, ids


@torch.inference_mode()
def test_main_model_logits_agree_with_transformers(pair):
    ours, theirs, ids = pair
    logits = ours.lm_head(ours.hidden(ids, rope_table(ours.c, ids.shape[1])))
    expected = theirs(ids).logits
    assert (logits - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.1, "a model without an opinion proves nothing"


@torch.inference_mode()
def test_mtp_logits_agree_with_an_independent_forward_pass(pair):
    """Depth 0 through transformers' decoder layer, put together here from the checkpoint's tensors."""
    from safetensors.torch import load_file
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    ours, theirs, ids = pair
    c, n = ours.c, ours.c.num_hidden_layers
    state = {k.removeprefix(f"model.layers.{n}."): v for k, v in ours.state_dict().items() if f"layers.{n}." in k}
    layer = DeepseekV3DecoderLayer(theirs.config, n).eval()
    fused = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        fused[name] = torch.stack([state[f"mlp.experts.{e}.{name}.weight"] for e in range(c.n_routed_experts)])
    own = {k: v for k, v in state.items() if ".experts." not in k}
    own["mlp.experts.gate_up_proj"] = torch.cat((fused["gate_proj"], fused["up_proj"]), 1)
    own["mlp.experts.down_proj"] = fused["down_proj"]
    report = layer.load_state_dict(own, strict=False)
    assert report.missing_keys == []

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * weight

    tokens, nexts = ids[:, :-1], ids[:, 1:]
    hidden = theirs.model(tokens).last_hidden_state
    embedded = theirs.model.embed_tokens(nexts).clone()
    embedded[:, 0] = 0
    joined = torch.cat((norm(embedded, state["enorm.weight"]), norm(hidden, state["hnorm.weight"])), -1)
    x = joined @ state["eh_proj.weight"].T
    positions = torch.arange(tokens.shape[1])[None]
    rope = theirs.model.rotary_emb(x, positions)
    t = tokens.shape[1]
    mask = torch.full((t, t), float("-inf")).triu(1)[None, None]
    out = layer(x, attention_mask=mask, position_embeddings=rope, position_ids=positions)
    out = out[0] if isinstance(out, tuple) else out
    expected = theirs.lm_head(norm(out, state["shared_head.norm.weight"]))

    rope = rope_table(c, t)
    embedded = ours.model.embed_tokens(nexts)
    logits = ours.mtp_logits(ours.mtp.unroll(ours.hidden(tokens, rope), embedded, rope, 1)[0])
    assert (logits - expected).abs().max() < TOLERANCE
    if export.WEIGHTS.exists():
        files = load_file(export.WEIGHTS / export.MODEL_FILE)
        assert torch.equal(files[f"model.layers.{Config().num_hidden_layers}.embed_tokens.weight"],
                           files["model.embed_tokens.weight"])  # fmt: skip


@torch.inference_mode()
def test_deeper_drafts_see_what_an_engine_step_would_see(pair):
    """Depth 1 at one place, computed step by step over an explicit key-value list, equals the unrolled form."""
    ours, _, ids = pair
    tokens, nexts = ids[:1, :40], ids[:1, 1:41]
    rope = rope_table(ours.c, 40)
    hidden, embedded = ours.hidden(tokens, rope), ours.model.embed_tokens(nexts)
    depth0, depth1, depth2 = ours.mtp.unroll(hidden, embedded, rope, 3)
    mtp, place = ours.mtp, 30
    normed = mtp.shared_head["norm"]

    def entry(h, position):
        """One drafter step at one position: its input and its query, key and value."""
        x = mtp.eh_proj(torch.cat((mtp.enorm(embedded[:, position : position + 1]), mtp.hnorm(h)), -1))
        one = tuple(r[position : position + 1] for r in rope)
        return x, mtp.self_attn.project(mtp.input_layernorm(x), one)

    def finish(x, q, k, v):
        weights = (q @ k.transpose(-1, -2) * mtp.self_attn.scale).softmax(-1)
        x = x + mtp.self_attn.output(weights @ v)
        return x + mtp.mlp(mtp.post_attention_layernorm(x))

    x0 = mtp.enter(hidden, embedded, torch.arange(40))
    _, keys, values = mtp.self_attn.project(mtp.input_layernorm(x0), rope)
    keys, values = keys[:, :, : place + 1], values[:, :, : place + 1]
    h = depth0[:, place : place + 1]
    for expected, position in ((depth1, place + 1), (depth2, place + 2)):
        x, (q, k, v) = entry(normed(h), position)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        h = finish(x, q, keys, values)
        assert (h - expected[:, position : position + 1]).abs().max() < TOLERANCE


def test_the_model_is_what_the_design_asks_for():
    c = Config.from_hf(export.WEIGHTS)
    model, _ = export.load(export.WEIGHTS)
    assert (c.kv_lora_rank, c.qk_rope_head_dim, c.num_nextn_predict_layers) == (512, 64, 1)
    assert 16 <= c.num_hidden_layers <= 24 and 128 <= c.hidden_size <= 192
    assert export.parameters(model) <= 10_000_000
    assert sum(p.stat().st_size for p in export.WEIGHTS.glob("*.safetensors")) <= 20_000_000
    assert c.yarn.factor * c.yarn.original_max_position_embeddings == c.max_position_embeddings == 8192


@torch.inference_mode()
def test_cached_greedy_decoding_equals_transformers(pair):
    """Two prompts of different length in one padded batch, against transformers without a cache."""
    ours, theirs, ids = pair
    prompts = [ids[0, :60].tolist(), ids[1, :43].tolist()]
    for prompt, completion in zip(prompts, decode.complete(ours, prompts, 12), strict=True):
        row = list(prompt)
        for token in completion:
            assert theirs(torch.tensor([row])).logits[0, -1].argmax() == token
            row.append(token)
