"""SonicMoE: grouped GEMMs in CuTe DSL with gather, SwiGLU and their backward fused in (Dao-AILab/sonic-moe)."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import (
    SHARED_BESIDE,
    Contender,
    Place,
    Rival,
    RivalOptions,
    lacks_package,
    needs_bf16,
    needs_gpu,
    needs_one_rank,
    version,
)
from moeloom.errors import MoeloomError

#: The tile configuration that ``--sonicmoe-tiles default`` pins, as fields of its ``GemmConfig``; it is also the
#: package's own default on Hopper.
PINNED = dict(tile_m=128, tile_n=192, pingpong=True, cluster_m=2, cluster_n=1, device_capacity=9)
#: Which choice of tiles was in force when its GEMMs were first imported; a process keeps the first.
_TILES: list[str] = []


def _choose_tiles(tiles: str) -> None:
    """Pin the tuner's candidates, which it reads once, when its GEMM module is imported."""
    if _TILES:
        if _TILES[0] != tiles:
            raise MoeloomError(f"SonicMoE was already loaded with tiles '{_TILES[0]}'; use another process")
        return
    if tiles == "default":
        if "quack.gemm_interface" in sys.modules:
            raise MoeloomError("quack.gemm_interface was imported before its tiles could be pinned")
        import quack.gemm_config as gemm_config

        only = gemm_config.GemmConfig(**PINNED, is_dynamic_persistent=False)
        gemm_config.get_all_configs = lambda *args, **kwargs: [only]
    _TILES.append(tiles)


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """Turn [E, 2I, H] with gate rows first into rows gate 0, up 0, gate 1, up 1, ...: the layout of its kernels."""
    experts, two_inner, hidden = gate_up.shape
    return gate_up.view(experts, 2, two_inner // 2, hidden).transpose(1, 2).reshape(gate_up.shape)


def separate_gate_up(gate_up: Tensor) -> Tensor:
    """Undo :func:`interleave_gate_up`."""
    experts, two_inner, hidden = gate_up.shape
    return gate_up.view(experts, two_inner // 2, 2, hidden).transpose(1, 2).reshape(gate_up.shape)


class SonicContender(Contender):
    """``moe_general_routing_inputs``: token and expert of every route, from which it builds its own order."""

    def __init__(self, problem: Problem, tiles: str) -> None:
        super().__init__(problem)
        _choose_tiles(tiles)
        from sonicmoe import moe_general_routing_inputs
        from sonicmoe.enums import ActivationType

        if problem.has_empty_routes:
            raise MoeloomError("this adapter cannot hand over routes of id -1")
        self._call, self._activation = moe_general_routing_inputs, ActivationType.SWIGLU
        # Weights in the layout that its kernels are fastest with, made once, as a model would store them.
        self.leaves["gate_up_proj"] = interleave_gate_up(problem.gate_up).requires_grad_()
        tokens, top_k = problem.ids.shape
        self._tokens = torch.arange(tokens, device=problem.device, dtype=torch.int32).repeat_interleave(top_k)
        self._experts = problem.ids.reshape(-1).to(torch.int32)
        self._stream = torch.cuda.current_stream().cuda_stream
        notes = [version("sonic-moe"), version("quack-kernels"), f"tiles {tiles}"]
        if tiles == "default":
            notes[-1] = "tiles pinned to 128x192 ping-pong, cluster 2x1"
        notes += ["interleaved gate and up"]
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        notes += ["no clamp"] if problem.point.shape.swiglu_limit is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run its layer."""
        out, _ = self._call(
            self.leaves["x"],
            self.leaves["topk_weights"].reshape(-1),
            self._tokens,
            self._experts,
            self.leaves["gate_up_proj"].permute(1, 2, 0),
            None,
            self.leaves["down_proj"].permute(1, 2, 0),
            None,
            self.problem.num_local_experts,
            self._stream,
            self._activation,
            False,
        )
        return self.add_shared(out)

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients with gate rows first again."""
        found = super().gradients()
        if "d_gate_up_proj" in found:
            found["d_gate_up_proj"] = separate_gate_up(found["d_gate_up_proj"].contiguous())
        return found


class SonicMoE(Rival):
    """The fastest open MoE layer on one Hopper GPU."""

    name = backend = "sonicmoe"

    def missing(self, place: Place) -> str | None:
        """Needs its wheels, one CUDA device and bf16."""
        reasons = needs_gpu(place), needs_bf16(place), needs_one_rank(place)
        absent = lacks_package("sonicmoe", "sonic-moe") or lacks_package("quack", "quack-kernels")
        return next((reason for reason in (*reasons, absent) if reason), None)

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Load it with the chosen tiles; its first calls compile."""
        return SonicContender(problem, options.sonicmoe_tiles)
