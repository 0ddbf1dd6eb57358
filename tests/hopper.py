"""A layer for the hopper kernels: inputs, fp64 answer, and launches that run in the emulator or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeloom.runtime.forward import Operands, forward_launch, schedule_launches
from moeloom.runtime.launch import Launch
from moeloom.runtime.tuning import ALL, Tuning
from moeloom.runtime.workspace import Shape, Workspace, make_workspace
from tests.cases import route


@dataclass(frozen=True)
class Sizes:
    """What the answer depends on; the last expert of each pair is unused and NaN if ``nan_neighbours``."""

    tokens: int = 20
    hidden: int = 128
    inner: int = 64
    experts: int = 4
    top_k: int = 2
    routing: str = "ragged"
    limit: float | None = None
    nan_neighbours: bool = False
    start: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Layout:
    """What it must not depend on."""

    minibatch_rows: int = 128
    ring_rows: int = 256
    saved_rows: int = 0
    num_sms: int = 3
    deadline_s: float = 0.0
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    start: Tensor | None = None

    def to(self, device: str) -> Inputs:
        return Inputs(**{name: t if t is None else t.to(device) for name, t in vars(self).items()})


def make_inputs(sizes: Sizes) -> Inputs:
    """Draw inputs. Ids that are no expert are -1, E and beyond 2**32; their weights are NaN."""
    g = torch.Generator().manual_seed(sizes.seed)
    t, h, i, e, k = sizes.tokens, sizes.hidden, sizes.inner, sizes.experts, sizes.top_k

    def draw(*shape: int, fan: int = 1) -> Tensor:
        return (torch.randn(*shape, generator=g) * fan**-0.5).to(torch.bfloat16)

    ids = route(sizes.routing, t, e, k, g)
    weights = torch.randn(t, k, generator=g)
    nothing = (ids < 0).nonzero()
    for n, place in enumerate(nothing):
        ids[tuple(place)] = (-1, e, 2**32, -(2**33) + 1)[n % 4]
        weights[tuple(place)] = float("nan")
    gate_up, down = draw(e, 2 * i, h, fan=h), draw(e, h, i, fan=i)
    if sizes.nan_neighbours:
        ids = torch.where((ids >= 0) & (ids < e), ids // 2 * 2, ids)
        gate_up[1::2], down[1::2] = float("nan"), float("nan")
    x = draw(t, h)
    start = torch.randn(t, h, generator=g) if sizes.start else None
    return Inputs(x, ids.contiguous(), weights, gate_up, down, start)


def answer(given: Inputs, limit: float | None) -> Tensor:
    """The layer's output in fp64, with roundings to bf16 where the kernel has them; [T, H]."""
    experts = given.gate_up.shape[0]
    out = torch.zeros(given.x.shape, dtype=torch.float64) if given.start is None else given.start.double()
    for token, row in enumerate(given.ids.tolist()):
        for k, expert in enumerate(row):
            if 0 <= expert < experts:
                gate_up = (given.gate_up[expert].double() @ given.x[token].double()).bfloat16().double()
                gate, up = gate_up.chunk(2)
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                hidden = (torch.nn.functional.silu(gate) * up).bfloat16().double()
                y = (given.down[expert].double() @ hidden).bfloat16().double()
                out[token] += given.weights[token, k].double() * y
    return out


def poison(workspace: Workspace) -> None:
    """Fill a workspace with NaN, and with numbers that are far from right."""
    for name, tensor in vars(workspace).items():
        if isinstance(tensor, Tensor) and name not in ("pointers", "trouble", "alarm", "alarm_address"):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)


class Prepared:
    """One call, ready to launch.

    Attributes:
        launches: schedule and layer, in order.
        outputs: tensors that it writes, by name; ``gate_up`` only if rows are saved.
    """

    def __init__(self, given: Inputs, sizes: Sizes, layout: Layout, module=None, parts=ALL) -> None:
        device = given.x.device
        experts, two_inner, hidden = given.gate_up.shape
        tokens, top_k = given.ids.shape
        shape = Shape(device, hidden, two_inner // 2, experts, 1, top_k, layout.ring_rows)
        self.workspace = make_workspace(shape, tokens)
        poison(self.workspace)
        self.outputs = {"out": torch.full_like(given.x, float("nan"))}
        gate_up = None
        if layout.saved_rows:
            gate_up = given.x.new_full((layout.saved_rows, two_inner), float("nan"))
            self.outputs["gate_up"] = gate_up
        operands = Operands(
            x=given.x,
            topk_ids=given.ids,
            all_ids=given.ids,
            topk_weights=given.weights,
            gate_up_proj=given.gate_up,
            down_proj=given.down,
            out=self.outputs["out"],
            rows_per_expert=torch.full((experts,), -5, device=device),
            gate_up=gate_up,
            limit=sizes.limit,
            start=given.start,
        )
        self.operands = operands
        self.launches = self.launches_in(self.workspace, layout, parts)

    def launches_in(self, workspace: Workspace, layout: Layout, parts=ALL) -> list[Launch]:
        """The launches of this call in any workspace that is large enough."""
        layer = forward_launch(
            self.operands,
            workspace,
            minibatch_rows=layout.minibatch_rows,
            num_sms=layout.num_sms,
            deadline_s=layout.deadline_s,
            tuning=layout.tuning,
            parts=parts,
        )
        return [*schedule_launches(self.operands, workspace), layer]

    def emulate(self, emu, kernel=None) -> dict[str, Tensor]:
        """Launch in an emulator, with another kernel for the layer if one is given."""
        emu.register("x", self.operands.x)
        for name in ("x_ring", "hidden_ring", "slots"):
            emu.register(name, getattr(self.workspace, name), written=False)
        emu.register("alarm", self.workspace.alarm)
        for launch in self.launches:
            which = kernel if kernel is not None and launch is self.launches[-1] else launch.kernel
            emu.launch(which, launch.grid, launch.args, num_warps=launch.num_warps)
        emu.kept = self
        return self.outputs

    def run(self) -> dict[str, Tensor]:
        """Launch on the GPU."""
        for launch in self.launches:
            launch.run()
        return self.outputs
