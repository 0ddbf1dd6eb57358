"""Inputs for the layer: sizes, routings of every kind, dtypes. Used by all tests of the layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moeloom.config import MoEConfig
from moeloom.functional import SharedExperts, moe

ROUTINGS = (
    "random",
    "balanced",
    "zipf",
    "hot-expert",
    "hot-rank",
    "empty-ranks",
    "one-route",
    "none",
    "ragged",
    "duplicates",
)


@dataclass
class Inputs:
    """Arguments of one layer call over the global batch, and the gradient of its output."""

    x: Tensor
    ids: Tensor
    topk_weights: Tensor
    gate_up: Tensor
    down: Tensor
    d_out: Tensor
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None
    limit: float | None = None

    def floats(self) -> dict[str, Tensor]:
        """Everything that has a gradient, by name."""
        names = ("x", "topk_weights", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def part(self, first: int, end: int, rank: int, ranks: int) -> Inputs:
        """What rank ``rank`` of ``ranks`` holds, when its tokens are first..end-1."""
        local = self.gate_up.shape[0] // ranks
        mine = slice(rank * local, (rank + 1) * local)
        tokens = {n: getattr(self, n)[first:end] for n in ("x", "ids", "topk_weights", "d_out")}
        return replace(self, **tokens, gate_up=self.gate_up[mine], down=self.down[mine])


@dataclass(frozen=True)
class Case:
    """Sizes and kind of an input."""

    tokens: int = 37
    hidden: int = 24
    inner: int = 16
    experts: int = 8
    top_k: int = 2
    routing: str = "random"
    dtype: torch.dtype = torch.float32
    shared: int = 0
    shared_gate: bool = False
    limit: float | None = None
    signed_weights: bool = False
    seed: int = 0
    scale: float = field(default=1.0)

    def make(self) -> Inputs:
        """Draw the inputs."""
        g = torch.Generator().manual_seed(self.seed)
        t, h, i, e, k = self.tokens, self.hidden, self.inner, self.experts, self.top_k

        def draw(*shape: int, fan: int = 1) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * self.scale * fan**-0.5).to(self.dtype)

        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        weights = torch.rand(t, k, generator=g, dtype=torch.float64).to(wide)
        if self.signed_weights:
            weights = weights * torch.randint(-1, 2, (t, k), generator=g)
        inputs = Inputs(
            x=draw(t, h),
            ids=route(self.routing, t, e, k, g),
            topk_weights=weights,
            gate_up=draw(e, 2 * i, h, fan=h),
            down=draw(e, h, i, fan=i),
            d_out=draw(t, h),
            limit=self.limit,
        )
        if self.shared:
            inputs.shared_gate_up = draw(2 * self.shared, h, fan=h)
            inputs.shared_down = draw(h, self.shared, fan=self.shared)
        if self.shared_gate:
            inputs.shared_gate = draw(h, fan=h)
        return inputs


def route(kind: str, tokens: int, experts: int, top_k: int, g: torch.Generator) -> Tensor:
    """Draw int64 [tokens, top_k] expert ids; after the imbalance suite of case 25 of the public reports."""
    scores = torch.rand(tokens, experts, generator=g)
    distinct = (
        scores.argsort(dim=1)[:, :top_k] if top_k <= experts else torch.randint(experts, (tokens, top_k), generator=g)
    )
    if kind == "random":
        return distinct
    if kind == "balanced":
        return (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
    if kind == "zipf":
        chance = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
        return torch.multinomial(chance.expand(max(tokens, 1), -1), top_k, replacement=top_k > experts, generator=g)[
            :tokens
        ]
    if kind == "hot-expert":
        return torch.full((tokens, top_k), experts - 1, dtype=torch.int64)
    if kind == "hot-rank":
        return distinct % max(experts // 4, 1)
    if kind == "empty-ranks":
        return distinct % max(experts // 2, 1) + experts // 2 * (experts > 1)
    if kind == "one-route":
        ids = torch.full((tokens, top_k), -1, dtype=torch.int64)
        if tokens:
            ids[tokens // 2, -1] = experts // 2
        return ids
    if kind == "none":
        return torch.full((tokens, top_k), -1, dtype=torch.int64)
    if kind == "ragged":
        return torch.where(torch.rand(tokens, top_k, generator=g) < 0.4, -1, distinct)
    if kind == "duplicates":
        return distinct[:, :1].expand(-1, top_k).contiguous()
    raise ValueError(kind)


def run(inputs: Inputs, group=None, config: MoEConfig | None = None) -> dict[str, Tensor]:
    """Run our layer forward and backward; return out and all gradients by the oracle's names."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.floats().items()}
    shared = None
    if "shared_gate_up" in leaves:
        shared = SharedExperts(leaves["shared_gate_up"], leaves["shared_down"], leaves.get("shared_gate"))
    out = moe(
        leaves["x"],
        inputs.ids,
        leaves["topk_weights"],
        leaves["gate_up"],
        leaves["down"],
        shared=shared,
        swiglu_limit=inputs.limit,
        group=group,
        config=config,
    )
    out.backward(inputs.d_out)
    names = {"x": "d_x", "topk_weights": "d_topk_weights", "gate_up": "d_gate_up_proj", "down": "d_down_proj"}
    return {"out": out.detach()} | {names.get(n, f"d_{n}"): t.grad for n, t in leaves.items()}


ROUTED = ("out", "d_x", "d_topk_weights", "d_gate_up_proj", "d_down_proj")
#: Layouts whose bits must be equal: everything saved, nothing saved, some saved; many minibatches and laps.
LAYOUTS = (
    MoEConfig(),
    MoEConfig(minibatch_rows=128, ring_rows=256, saved_rows=0),
    MoEConfig(minibatch_rows=128, ring_rows=384, saved_rows=128),
    MoEConfig(minibatch_rows=256, ring_rows=512, saved_rows=384),
)
