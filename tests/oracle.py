"""The layer in fp64 by a dense loop over experts, with autograd; and how far a result is from it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cases import Inputs

NAMES = (
    "out",
    "d_x",
    "d_topk_weights",
    "d_gate_up_proj",
    "d_down_proj",
    "d_shared_gate_up",
    "d_shared_down",
    "d_shared_gate",
)


def expert(x: Tensor, gate_up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    """One SwiGLU expert on [T, H]."""
    gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up) @ down.t()


def dense(inputs: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return out and all gradients of ``inputs`` in ``dtype``; every expert sees every token, masked by its routes."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.floats().items()}
    x, weights = leaves["x"], leaves["topk_weights"]
    out = x * 0
    if "shared_gate_up" in leaves:
        out = expert(x, leaves["shared_gate_up"], leaves["shared_down"], inputs.limit)
        if "shared_gate" in leaves:
            out = out * torch.sigmoid(x @ leaves["shared_gate"])[:, None]
    for e in inputs.ids[(inputs.ids >= 0) & (inputs.ids < inputs.gate_up.shape[0])].unique().tolist():
        factor = (weights * (inputs.ids == e)).sum(-1, keepdim=True)
        y = expert(x, leaves["gate_up"][e], leaves["down"][e], inputs.limit)
        # Not factor * y alone: a token without a route to e must not see y, whatever it is.
        out = out + torch.where((inputs.ids == e).any(-1, keepdim=True), factor * y, 0)
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.d_out.to(dtype), allow_unused=True)
    named = dict(zip(leaves, gradients, strict=True))
    keys = ("x", "topk_weights", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")
    found = {f"{n}": named.get(k) for n, k in zip(NAMES[1:], keys, strict=True)}
    zero = {n: torch.zeros_like(leaves[k]) for n, k in zip(NAMES[1:], keys, strict=True) if k in leaves}
    return {"out": out.detach()} | {n: g if g is not None else zero[n] for n, g in found.items() if n in zero}


def relative_l2(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want| over all elements; the norm of ``got`` where ``want`` is zero."""
    error, size = (got.double() - want.double()).norm(), want.double().norm()
    return float(error / size) if size > 0 else float(error)
