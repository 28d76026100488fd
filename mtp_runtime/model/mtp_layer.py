"""The multi-token-prediction layer: one decoder layer that predicts the token after next, applied K times over.

Source: the DeepSeek-V3 report, section 2.2, and the way serving engines drive the published single layer: at depth k
the hidden state of depth k - 1 and the embedding of the newest token are normed, concatenated and projected
(`eh_proj`); all depths share the layer, its KV cache, and the main model's embedding and head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtp_runtime.model.arch import Config, Layer, RMSNorm, _linear

RESIDUAL = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the residual stream with


class MTPLayer(Layer):
    """A MoE decoder layer behind `eh_proj`; `embed_tokens` and `shared_head.head` belong to the main model."""

    def __init__(self, c: Config) -> None:
        super().__init__(c, dense=False)
        self.enorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = _linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(c.hidden_size, c.rms_norm_eps)})

    def enter(self, hidden: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        """Join hidden states and embeddings [B, T, C]; the embedding at position 0 is dropped, as engines do."""
        embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))

    def unroll(self, hidden: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor], depths: int) -> list[Tensor]:
        """Hidden states of every depth for teacher-forced text.

        hidden [B, T, C]: the main model's normed hidden states h_0..h_{T-1}. embedded [B, T, C]: embeddings of the
        *next* tokens t_1..t_T. Depth k (from 0), place j >= k reads depth k-1's output at j-1 and token t_{j+1}, and
        predicts t_{j+2}. As in an engine, it attends to the entries that a real step finds in the one KV cache: those
        of depth 0 up to j-k, then one of each later depth. Returns `depths` tensors [B, T, C]; places j < k are
        meaningless. rope: cos and sin for T positions.
        """
        t = hidden.shape[1]
        positions = torch.arange(t)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for _depth in range(depths):
            x = self.enter(hidden, embedded, positions)
            q, k, v = self.self_attn.project(self.input_layernorm(x), rope)
            keys.append(k)
            values.append(v)
            x = x + self.self_attn.output(self._attend(q, keys, values, positions))
            x = x + self.mlp(self.post_attention_layernorm(x))
            outputs.append(x)
            # The engine feeds a later depth the states *after* the head's norm (vLLM 0.32, SGLang).
            normed = self.shared_head["norm"](x)
            hidden = torch.cat((normed[:, :1], normed[:, :-1]), 1)
        return outputs

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], positions: Tensor) -> Tensor:
        """Attention of depth len(keys)-1: depth 0's keys up to j - depth, then one key of each later depth."""
        depth = len(keys) - 1
        scores = (q @ keys[0].transpose(-1, -2)) * self.self_attn.scale
        visible = positions[None, :] <= positions[:, None] - depth
        # A place without a past (j < depth) sees itself, so that no row is empty; its output is not used.
        visible = visible | ((positions[:, None] < depth) & (positions[None, :] == positions[:, None]))
        scores = [scores.masked_fill(~visible, float("-inf"))]
        shifted = []
        for later in range(1, depth + 1):
            back = depth - later
            k, v = (x.roll(back, 2) for x in (keys[later], values[later]))
            scores.append((q * k).sum(-1, keepdim=True) * self.self_attn.scale)
            shifted.append(v)
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., : len(positions)] @ values[0]
        for index, v in enumerate(shifted):
            out = out + weights[..., len(positions) + index, None] * v
        return out


class DeepseekV3(nn.Module):
    """Main model and MTP layer; `state_dict` names are `model.layers.N...` with the MTP layer as the last one."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        layers: list[nn.Module] = [Layer(c, i < c.first_k_dense_replace) for i in range(c.num_hidden_layers)]
        self.model.layers = nn.ModuleList([*layers, MTPLayer(c)])
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = _linear(c.hidden_size, c.vocab_size)

    @property
    def mtp(self) -> MTPLayer:
        layer = self.model.layers[-1]
        assert isinstance(layer, MTPLayer)
        return layer

    def hidden(self, tokens: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Normed hidden states [B, T, C] of tokens [B, T]: what the head reads and what the MTP layer is given."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers[:-1]:
            x = layer(x, rope)
        return self.model.norm(x)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """Draft logits of the MTP layer's hidden states."""
        return self.lm_head(self.mtp.shared_head["norm"](hidden))


def initialise(model: DeepseekV3, seed: int) -> None:
    """Normal weights scaled by fan-in; what adds to the residual stream is scaled down by depth."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.c.num_hidden_layers) ** -0.5
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        std = 0.02 if name.startswith(("model.embed_tokens", "lm_head")) else p.shape[1] ** -0.5 * 0.7
        if name.endswith(RESIDUAL):
            std *= depth
        with torch.no_grad():
            p.normal_(0.0, std, generator=generator)


def grow(small: DeepseekV3, config: Config, seed: int) -> DeepseekV3:
    """A deeper model that computes what `small` does: its layers spread out evenly, new ones that add nothing yet.

    ValueError when the depth of `config` is no multiple of the small model's.
    """
    old, new = small.c.num_hidden_layers, config.num_hidden_layers
    if new % old:
        raise ValueError(f"{new} layers cannot be grown from {old}: not a multiple")
    model = DeepseekV3(config)
    initialise(model, seed)
    places = {i: i * (new // old) for i in range(old)} | {old: new}
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers[:-1]):
            if index not in places.values():
                for name, p in layer.named_parameters():
                    if name.endswith(RESIDUAL):
                        p.zero_()
    for index, place in places.items():
        model.model.layers[place].load_state_dict(small.model.layers[index].state_dict())
    for part in ("embed_tokens", "norm"):
        getattr(model.model, part).load_state_dict(getattr(small.model, part).state_dict())
    model.lm_head.load_state_dict(small.lm_head.state_dict())
    return model
