"""A decoder-only MoE language model over bytes: RMSNorm, RoPE attention, MoE blocks.

Shapes: B sequences, S positions, D model width, V = 256 byte values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moeloom.config import MoEConfig
from moeloom.errors import ArgumentError, complain
from moeloom.layer import MoE
from moeloom.router import RouterConfig, Routing

VOCABULARY = 256
NORM_EPS = 1e-6
ROPE_BASE = 10_000.0
#: Odd 63-bit factor near 2^63 / golden ratio; neighbouring codes land far apart. The shift takes the well-mixed bits.
_HASH_FACTOR = 0x4F1BBCDCBFA53E0B
_HASH_SHIFT = 33


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        width: D, a multiple of 2 * heads.
        layers: blocks, each attention + MoE.
        heads: attention heads.
        experts, top_k, expert_width: of each MoE layer.
        shared_width: total width of shared experts, 0 for none.
        scoring: router scoring, ``"softmax"`` or ``"sigmoid"`` (then with a selection bias).
        ngram_slots: rows of each table of hashed n-gram embeddings, 0 for none.
        ngram_orders: lengths n of the n-grams, each with a table of its own.
    """

    width: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int = 0
    scoring: str = "softmax"
    ngram_slots: int = 0
    ngram_orders: tuple[int, ...] = (2, 3, 4)

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            fix = f"Try {2 * self.heads * max(1, round(self.width / (2 * self.heads)))}."
            raise ArgumentError(complain("width", f"be a multiple of 2 * heads = {2 * self.heads}", self.width, fix))

    @classmethod
    def from_dict(cls, values: dict) -> ModelConfig:
        """Build from plain values; unknown or missing names are an error."""
        refuse_unknown(cls, values, "the model configuration")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def refuse_unknown(cls: type, values: dict, what: str) -> None:
    """Raise ArgumentError when ``values`` names something that is no field of the dataclass ``cls``."""
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ArgumentError(complain(what, f"use only {', '.join(sorted(known))}", unknown, "Fix the names."))


class ByteEmbedding(nn.Module):
    """A vector for each byte, plus one for each hash of the last n bytes (as in arXiv 2412.09871, section 3.2.1).

    Bytes say little one by one. The hashed n-grams hand the first layer what it would have to learn to copy together,
    for the price of a table look-up.
    """

    def __init__(self, width: int, orders: tuple[int, ...], slots: int) -> None:
        super().__init__()
        self.orders, self.slots = orders if slots else (), slots
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.ngrams = nn.ModuleList(nn.Embedding(slots, width) for _ in self.orders)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed int64 ``tokens`` [B, S] to [B, S, D]; positions before the first count as byte 0."""
        x = self.bytes(tokens)
        for order, table in zip(self.orders, self.ngrams, strict=True):
            code = tokens + 1
            for back in range(1, order):
                # 64-bit multiplications wrap around, which is what a hash wants.
                code = code * _HASH_FACTOR + F.pad(tokens, (back, 0))[:, : tokens.shape[1]] + 1
            x = x + table(((code * _HASH_FACTOR) >> _HASH_SHIFT) % self.slots)
        return x


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., D]; fp32 in, fp32 out."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, NORM_EPS)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Attend over [B, S, D]; ``rope`` holds cos and sin, each [S, D / heads / 2]."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, rope), _rotate(k, rope)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + moe(norm(x))``."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None, options: MoEConfig | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.moe_norm = RMSNorm(config.width)
        self.moe = MoE(
            config.width,
            config.expert_width,
            config.experts,
            config.top_k,
            router=RouterConfig(scoring=config.scoring, selection_bias=config.scoring == "sigmoid"),
            shared_size=config.shared_width,
            group=group,
            config=options,
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing]:
        """Run one block on [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), rope)
        out, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + out, routing


class MoELanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        config: sizes.
        group: EP group over which the experts are spread, or None.
        options: options of the MoE layers.
    """

    def __init__(
        self, config: ModelConfig, group: dist.ProcessGroup | None = None, options: MoEConfig | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = ByteEmbedding(config.width, config.ngram_orders, config.ngram_slots)
        self.blocks = nn.ModuleList(Block(config, group, options) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        """Small outputs at the start: what writes into the residual stream is scaled by 1 / sqrt(2 * layers)."""
        scale = (2 * self.config.layers) ** -0.5
        nn.init.normal_(self.embedding.bytes.weight, std=1.0)
        for table in self.embedding.ngrams:
            nn.init.zeros_(table.weight)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.normal_(block.attention.qkv.weight, std=self.config.width**-0.5)
            nn.init.normal_(block.attention.out.weight, std=self.config.width**-0.5 * scale)
            with torch.no_grad():
                block.moe.down_proj *= scale
                if block.moe.shared_down_proj is not None:
                    block.moe.shared_down_proj *= scale

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        """Return logits fp32 [B, S, V] and the routing of every MoE layer, for int64 ``tokens`` [B, S]."""
        rope = _rope(tokens.shape[1], self.config.width // self.config.heads, tokens.device)
        x = self.embedding(tokens)
        routings = []
        for block in self.blocks:
            x, routing = block(x, rope)
            routings.append(routing)
        return self.head(self.norm(x)).float(), routings

    @property
    def moe_layers(self) -> list[MoE]:
        """The MoE layers, first to last."""
        return [block.moe for block in self.blocks]


def _rope(seq: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * base^(-2i / head_width), each fp32 [S, head_width / 2]."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angle = torch.arange(seq, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + half) of the last axis of [B, heads, S, head_width]."""
    cos, sin = (r.to(x.dtype) for r in rope)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
