"""Routings: which experts each token of a benchmark goes to, and with which weights.

Experts are those of the benchmark: all that its ranks hold together. A *slice* of a model (``--ep-slice 8``: E / 8
experts) is the layer of one rank of a larger EP group; its tokens have all their K routes among the experts of the
slice, which is what such a rank computes on average.

- ``balanced``: every expert gets the same number of routes, to within one.
- ``random``: K different experts a token, all equally likely.
- ``zipf``: K different experts a token; the chance of the r-th most popular one is proportional to 1 / r. Which expert
  is how popular is drawn once from the seed, so that popularity has nothing to do with the rank.
- ``hot-expert``: every token goes to expert 0, and to K - 1 others at random.
- ``hot-rank``: half of every token's routes (rounded up) go to the experts of rank 0, the rest to others. A single
  process has no rank to single out, so its experts count as those of 8 virtual ranks.
- ``replay:FILE``: recorded routes; FILE is a safetensors file with ``topk_ids`` [T, K] and ``topk_weights`` [T, K].

Weights are a softmax over K normal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moeloom.errors import ArgumentError, DataError, complain

NAMES = ("balanced", "random", "zipf", "hot-rank", "hot-expert")
REPLAY = "replay:"
#: Virtual ranks of a single process, for ``hot-rank``.
VIRTUAL_RANKS = 8


@dataclass(frozen=True)
class RoutingRequest:
    """What to draw.

    Attributes:
        name: one of :data:`NAMES`, or ``replay:FILE``.
        tokens: tokens of this rank.
        experts: experts of all ranks.
        top_k: routes of a token.
        seed: any integer.
        rank, ranks: whose tokens, of how many ranks.
    """

    name: str
    tokens: int
    experts: int
    top_k: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1


def check_name(name: str) -> None:
    """Raise ArgumentError unless ``name`` is a routing; a file to replay must exist."""
    if name.startswith(REPLAY):
        if not Path(name.removeprefix(REPLAY)).is_file():
            raise ArgumentError(complain("--routing", "name a file after replay:", repr(name), "Check the path."))
    elif name not in NAMES:
        rule = f"be one of {', '.join(NAMES)}, {REPLAY}FILE"
        raise ArgumentError(complain("--routing", rule, repr(name), "Fix the name."))


def draw(request: RoutingRequest) -> tuple[Tensor, Tensor]:
    """Return (ids int64 [T, K], weights fp32 [T, K]) on the CPU; the same on every machine for the same request.

    Raises:
        ArgumentError: an unknown name, or more routes a token than experts.
        DataError: a replay file that does not fit.
    """
    check_name(request.name)
    if request.top_k > request.experts:
        rule = f"leave at least top-k = {request.top_k} experts"
        raise ArgumentError(complain("--ep-slice", rule, f"{request.experts} experts", "Use a smaller slice number."))
    if request.name.startswith(REPLAY):
        return _replay(request)
    # The rank is part of the seed for tokens, but not for what all ranks must share (popularity, order of experts).
    own = torch.Generator().manual_seed(request.seed * 1009 + request.rank)
    common = torch.Generator().manual_seed(request.seed)
    ids = _DRAW[request.name](request, own, common)
    weights = torch.softmax(torch.randn(request.tokens, request.top_k, generator=own), -1)
    return ids, weights


def _balanced(request: RoutingRequest, own: torch.Generator, common: torch.Generator) -> Tensor:
    """Deal experts out in turn, over all ranks, then shuffle which token gets which hand."""
    count = request.tokens * request.top_k
    place = torch.arange(count) + request.rank * count
    order = torch.randperm(request.experts, generator=common)
    ids = order[place % request.experts].view(request.tokens, request.top_k)
    return ids[torch.randperm(request.tokens, generator=own)]


def _random(request: RoutingRequest, own: torch.Generator, common: torch.Generator) -> Tensor:
    return torch.rand(request.tokens, request.experts, generator=own).topk(request.top_k, dim=1).indices


def _zipf(request: RoutingRequest, own: torch.Generator, common: torch.Generator) -> Tensor:
    chance = 1 / torch.arange(1, request.experts + 1, dtype=torch.float32)
    chance = chance[torch.randperm(request.experts, generator=common)]
    # The largest of log(chance) + Gumbel noise are a draw without replacement in proportion to chance.
    noise = -torch.log(-torch.log(torch.rand(request.tokens, request.experts, generator=own).clamp(1e-20, 1 - 1e-7)))
    return (chance.log() + noise).topk(request.top_k, dim=1).indices


def _hot_expert(request: RoutingRequest, own: torch.Generator, common: torch.Generator) -> Tensor:
    score = torch.rand(request.tokens, request.experts, generator=own)
    score[:, 0] = 2.0
    return _shuffled(score.topk(request.top_k, dim=1).indices, own)


def _hot_rank(request: RoutingRequest, own: torch.Generator, common: torch.Generator) -> Tensor:
    parts = request.ranks if request.ranks > 1 else min(VIRTUAL_RANKS, request.experts)
    hot = request.experts // parts
    score = torch.rand(request.tokens, request.experts, generator=own)
    others = request.experts - hot
    inside = max(min(-(-request.top_k // 2), hot), request.top_k - others)
    ids = [score[:, :hot].topk(inside, dim=1).indices]
    if inside < request.top_k:
        ids.append(score[:, hot:].topk(request.top_k - inside, dim=1).indices + hot)
    return _shuffled(torch.cat(ids, 1), own)


def _shuffled(ids: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle the routes of each token, so that k says nothing about the expert."""
    return ids.gather(1, torch.rand(ids.shape, generator=generator).argsort(dim=1))


_DRAW = {
    "balanced": _balanced,
    "random": _random,
    "zipf": _zipf,
    "hot-expert": _hot_expert,
    "hot-rank": _hot_rank,
}


def _replay(request: RoutingRequest) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a recorded routing: the rows after those of the ranks before it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = request.name.removeprefix(REPLAY)
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(complain(path, "be a safetensors file", error, "Save it with safetensors.torch.")) from error
    missing = [name for name in ("topk_ids", "topk_weights") if name not in stored]
    if missing:
        raise DataError(
            complain(path, "hold topk_ids and topk_weights", sorted(stored), f"Add {' and '.join(missing)}.")
        )
    ids, weights = stored["topk_ids"], stored["topk_weights"]
    first, need = request.rank * request.tokens, request.ranks * request.tokens
    fits = ids.dim() == 2 and ids.shape[1] == request.top_k and ids.shape[0] >= need and weights.shape == ids.shape
    if not fits:
        rule = f"hold topk_ids and topk_weights of shape [>= {need}, {request.top_k}]"
        raise DataError(complain(path, rule, f"{list(ids.shape)} and {list(weights.shape)}", "Use fewer --tokens."))
    if ids.is_floating_point():
        raise DataError(complain(path, "hold integers in topk_ids", ids.dtype, "Convert them."))
    ids = ids[first : first + request.tokens].to(torch.int64).contiguous()
    weights = weights[first : first + request.tokens].to(torch.float32).contiguous()
    wrong = (ids < -1) | (ids >= request.experts)
    if wrong.any():
        rule = f"hold ids in [-1, {request.experts})"
        fix = "Ids of a whole model need --ep-slice 1, or ids of the slice."
        raise DataError(complain(path, rule, ids[wrong][0].item(), fix))
    if not torch.isfinite(weights).all():
        raise DataError(complain(path, "hold finite topk_weights", "NaN or infinity", "Look at how it was recorded."))
    return ids, weights
