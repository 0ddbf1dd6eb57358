"""The inputs of one benchmark point: tokens, routes, weights and the gradient of the output, normal random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom.bench.models import ModelShape
from moeloom.bench.routing import RoutingRequest, draw
from moeloom.errors import ArgumentError, complain
from moeloom.functional import SharedExperts
from moeloom.runtime.ep_group import EPGroup, resolve_group

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Seconds that a rank may wait for another outside of a layer call, where that one may still be compiling.
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Point:
    """One place of the benchmark matrix, before any tensor exists.

    Attributes:
        shape: sizes of the layer.
        tokens: tokens of a rank.
        routing: as in :mod:`moeloom.bench.routing`.
        shared: with the model's shared expert.
        dtype: a key of :data:`DTYPES`.
        ep_slice: the ranks hold the experts of 1 / ep_slice of the model.
        seed: of all random numbers.
    """

    shape: ModelShape
    tokens: int
    routing: str
    shared: bool = False
    dtype: str = "bf16"
    ep_slice: int = 8
    seed: int = 0

    def check(self, ranks: int) -> None:
        """Raise ArgumentError if the experts cannot be cut that way."""
        if self.shape.experts % (self.ep_slice * ranks):
            rule = f"divide the {self.shape.experts} experts of {self.shape.name}, times {ranks} rank(s)"
            raise ArgumentError(complain("--ep-slice", rule, self.ep_slice, "Try 8 / ranks."))


@dataclass(frozen=True)
class Problem:
    """The tensors of a point on one rank.

    Attributes:
        point: where in the matrix this is.
        group, process_group: the EP group, as ours and as torch's (None for one process).
        x: [T, H] operand dtype.
        ids: int64 [T, K], experts of all ranks; -1 = no route.
        weights: fp32 [T, K].
        gate_up, down: [local experts, 2I, H] and [local experts, H, I], operand dtype.
        shared: shared experts, equal on all ranks, or None.
        d_out: [T, H] operand dtype, gradient of the output.
        rows_per_expert: rows of each expert of this rank, from the tokens of all ranks.
    """

    point: Point
    group: EPGroup
    process_group: dist.ProcessGroup | None
    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    shared: SharedExperts | None
    d_out: Tensor
    rows_per_expert: list[int]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.x.device

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.gate_up.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.num_local_experts * self.group.size

    @property
    def has_empty_routes(self) -> bool:
        """Whether some id is -1; only replayed routings have such."""
        return bool((self.ids < 0).any())


def build(point: Point, device: torch.device, process_group: dist.ProcessGroup | None = None) -> Problem:
    """Draw the tensors of a point. Equal seeds give equal routes on every machine.

    Raises:
        ArgumentError, DataError: experts that cannot be cut, or a replay file that does not fit.
    """
    group = resolve_group(process_group)
    point.check(group.size)
    shape, dtype = point.shape, DTYPES[point.dtype]
    local = shape.experts // point.ep_slice // group.size
    request = RoutingRequest(
        name=point.routing,
        tokens=point.tokens,
        experts=local * group.size,
        top_k=shape.top_k,
        seed=point.seed,
        rank=group.rank,
        ranks=group.size,
    )
    ids, weights = draw(request)
    own = torch.Generator(device=device).manual_seed(point.seed * 1009 + 1 + group.rank)
    common = torch.Generator(device=device).manual_seed(point.seed * 1009)

    def normal(*size: int, fan: int = 1, generator: torch.Generator = own) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype).mul_(fan**-0.5)

    shared = None
    if point.shared:
        shared = SharedExperts(
            normal(2 * shape.shared, shape.hidden, fan=shape.hidden, generator=common),
            normal(shape.hidden, shape.shared, fan=shape.shared, generator=common),
            normal(shape.hidden, fan=shape.hidden, generator=common) if shape.shared_gate else None,
        )
    return Problem(
        point=point,
        group=group,
        process_group=process_group,
        x=normal(point.tokens, shape.hidden),
        ids=ids.to(device),
        weights=weights.to(device),
        gate_up=normal(local, 2 * shape.inner, shape.hidden, fan=shape.hidden),
        down=normal(local, shape.hidden, shape.inner, fan=shape.inner),
        shared=shared,
        d_out=normal(point.tokens, shape.hidden),
        rows_per_expert=_rows(ids, local, group),
    )


def _rows(ids: Tensor, local: int, group: EPGroup) -> list[int]:
    """Count the rows of this rank's experts over the tokens of all ranks."""
    mine = torch.bincount(ids[ids >= 0].reshape(-1), minlength=local * group.size).tolist()
    counts = group.gather_words(mine, phase="benchmark rows", seconds=PATIENCE_SECONDS)
    first = group.rank * local
    return [sum(column) for column in zip(*counts, strict=True)][first : first + local]
