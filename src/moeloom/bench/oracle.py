"""What the layer's results must be: fp64, expert by expert, and how far a plain loop in the operand dtype is from it.

The loop in the operand dtype is the *yardstick*: a rival is right if it is not much further from fp64 than the same
products and activations done one by one by torch. So no tolerance is a number that somebody liked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moeloom.bench.inputs import Problem
from moeloom.bench.timing import significant

#: Rows of a tensor that are compared at once, in fp64.
_CHUNK = 4096


@dataclass(frozen=True)
class Error:
    """Distance of a tensor from what it must be.

    Attributes:
        relative_l2: ``|got - want| / |want|``; NaN if anything is NaN.
        largest: largest element of ``|got - want|`` over the root mean square of ``want``.
    """

    relative_l2: float
    largest: float

    def rounded(self) -> dict[str, float]:
        """Return both numbers as records hold them."""
        return {name: significant(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Oracle:
    """Right results, and the errors of the yardstick.

    Attributes:
        want: by name, ``out`` and ``d_...``; sums over tokens in fp64, weight gradients rounded to fp32 where operands
            are bf16 (they are large, and fp32 is 65,536 times finer).
        yardstick: by name, of the loop in the operand dtype.
        limits: by name, the largest relative L2 error that counts as right.
    """

    want: dict[str, Tensor]
    yardstick: dict[str, Error]
    limits: dict[str, float]


def build_oracle(problem: Problem, *, backward: bool = True) -> Oracle:
    """Compute a problem in fp64 and by the yardstick.

    Args:
        problem: the point; with several ranks all of them must call this.
        backward: also all gradients.
    """
    dtype = problem.x.dtype
    want = dense(problem, torch.float64, backward=backward)
    plain = dense(problem, dtype, backward=backward)
    errors = compare(plain, want)
    # Twice the yardstick and one rounding of the result, which is what another order of the same roundings may cost.
    band = torch.finfo(dtype).eps / 2
    limits = {name: 2 * (error.relative_l2 + band) for name, error in errors.items()}
    return Oracle(want, errors, limits)


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, Error]:
    """Return the error of every tensor in ``got``."""
    return {name: tensor_error(tensor, want[name]) for name, tensor in got.items()}


def tensor_error(got: Tensor, want: Tensor) -> Error:
    """Compare two tensors of one shape in fp64, piece by piece."""
    if got.shape != want.shape:
        return Error(float("nan"), float("nan"))
    sums = torch.zeros(3, dtype=torch.float64, device=want.device)
    rows = _CHUNK if want.dim() < 3 else 1
    for mine, theirs in zip(got.split(rows), want.split(rows), strict=True):
        exact = theirs.double()
        off = mine.double() - exact
        sums[0] += off.square().sum()
        sums[1] += exact.square().sum()
        sums[2] = torch.maximum(sums[2], off.abs().amax())
    off, size, largest = sums.tolist()
    # Without routes the right result is zero, and any difference from it counts in full.
    scale, mean_square = (size, size / want.numel()) if size > 0 else (1.0, 1.0)
    return Error((off / scale) ** 0.5, largest / mean_square**0.5)


def dense(problem: Problem, dtype: torch.dtype, *, backward: bool) -> dict[str, Tensor]:
    """Compute the layer by a loop over experts with operands in ``dtype``, and sums over experts at least in fp32.

    Returns:
        ``out`` [T, H]; with ``backward`` also d_x, d_topk_weights, d_gate_up_proj, d_down_proj and, with a shared
        expert, d_shared_gate_up, d_shared_down, d_shared_gate.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keep = torch.float64 if dtype == torch.float64 and problem.x.dtype == torch.float32 else torch.float32
    x, ids, weights, d_out = (_all_ranks(t, problem) for t in (problem.x, problem.ids, problem.weights, problem.d_out))
    limit = problem.point.shape.swiglu_limit
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    d_x, d_w = torch.zeros_like(out), torch.zeros(weights.shape, dtype=wide, device=x.device)
    d_gate_up, d_down = (torch.zeros(w.shape, dtype=keep, device=x.device) for w in (problem.gate_up, problem.down))
    first = problem.group.rank * problem.num_local_experts
    for local in range(problem.num_local_experts):
        token, k = (ids == first + local).nonzero(as_tuple=True)
        if not token.numel():
            continue
        leaves = [x[token], problem.gate_up[local], problem.down[local], weights[token, k].to(wide)]
        leaves = [t.detach().to(dtype if i < 3 else wide).requires_grad_(backward) for i, t in enumerate(leaves)]
        y = leaves[3][:, None] * swiglu(*leaves[:3], limit).to(wide)
        out.index_add_(0, token, y.detach())
        if backward:
            grads = torch.autograd.grad(y, leaves, d_out[token].to(wide))
            d_x.index_add_(0, token, grads[0].to(wide))
            d_gate_up[local], d_down[local] = grads[1], grads[2]
            d_w[token, k] = grads[3]
    found = {"out": out} | ({"d_x": d_x, "d_topk_weights": d_w} if backward else {})
    found = {name: _own_part(t, problem) for name, t in found.items()}
    if backward:
        found |= {"d_gate_up_proj": d_gate_up, "d_down_proj": d_down}
    if problem.shared is not None:
        _add_shared(found, problem, dtype, wide, backward)
    return found


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    """One SwiGLU expert on [T, H], differentiable, every intermediate in the dtype of the operands."""
    gate, up = _product(x, gate_up).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _product(F.silu(gate) * up, down)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b.t()`` in the dtype of ``a``, summed at least in fp32."""
    if a.dtype == torch.bfloat16 and a.device.type == "cpu":
        # The same sums and the same rounding; torch's own bf16 products crawl on CPUs that have none.
        return (a.float() @ b.float().t()).to(a.dtype)
    return a @ b.t()


def _add_shared(found: dict[str, Tensor], problem: Problem, dtype, wide, backward: bool) -> None:
    """Add the shared expert of this rank's own tokens."""
    shared = problem.shared
    names = {"gate_up": shared.gate_up_proj, "down": shared.down_proj, "gate": shared.gate}
    leaves = {"x": problem.x} | {name: t for name, t in names.items() if t is not None}
    leaves = {name: t.detach().to(dtype).requires_grad_(backward) for name, t in leaves.items()}
    y = swiglu(leaves["x"], leaves["gate_up"], leaves["down"], problem.point.shape.swiglu_limit)
    if "gate" in leaves:
        y = y * torch.sigmoid(leaves["x"] @ leaves["gate"])[:, None]
    found["out"] += y.detach().to(wide)
    if backward:
        grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), problem.d_out.to(dtype)), strict=True))
        found["d_x"] += grads.pop("x").to(wide)
        found |= {f"d_shared_{name}": grad for name, grad in grads.items()}


def _all_ranks(tensor: Tensor, problem: Problem) -> Tensor:
    """Return the rows of all ranks, in rank order."""
    if problem.group.size == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(problem.group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=problem.process_group)
    return torch.cat(parts)


def _own_part(tensor: Tensor, problem: Problem) -> Tensor:
    """Sum over ranks what each one's experts gave to all tokens; return the rows of this rank's tokens."""
    if problem.group.size == 1:
        return tensor
    dist.all_reduce(tensor, group=problem.process_group)
    tokens = problem.point.tokens
    return tensor[problem.group.rank * tokens : (problem.group.rank + 1) * tokens].clone()
