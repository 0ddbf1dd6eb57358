"""Dense products of the same number of operations: not a layer, but what the GEMM library makes of such shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.bench.ceiling import product_dtype
from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import Contender, Place, Rival, RivalOptions


class DenseContender(Contender):
    """All rows through one expert's two products, and the four products of backward; no routing, no activation.

    A shared expert is as many more rows as it takes to have its operations.
    """

    is_layer = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        shape = problem.point.shape
        rows = sum(problem.rows_per_expert)
        if problem.shared is not None:
            rows += -(-problem.point.tokens * shape.shared // shape.inner)
        device, dtype = problem.device, product_dtype(problem.device, problem.x.dtype)
        draw = torch.Generator(device=device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, device=device, dtype=dtype)

        self._gate_up, self._down = problem.gate_up[0].to(dtype), problem.down[0].to(dtype)
        self._x, self._d_y = normal(rows, shape.hidden), normal(rows, shape.hidden)
        self._hidden, self._d_gate_up = normal(rows, shape.inner), normal(rows, 2 * shape.inner)
        self.note = "not a layer: plain dense products of the same operations"

    def forward(self) -> Tensor:
        """Multiply by both weights; return the second result."""
        torch.mm(self._x, self._gate_up.t())
        return torch.mm(self._hidden, self._down.t())

    def backward(self, out: Tensor) -> None:
        """Multiply as two data gradients and two weight gradients do."""
        torch.mm(self._d_y, self._down)
        torch.mm(self._d_gate_up, self._gate_up)
        torch.mm(self._d_y.t(), self._hidden)
        torch.mm(self._d_gate_up.t(), self._x)


class CublasDense(Rival):
    """cuBLAS on a GPU; on a CPU whatever GEMM library torch has."""

    name = backend = "cublas-dense"

    def missing(self, place: Place) -> str | None:
        """It is never missing."""
        return None

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Draw operands of the right shapes."""
        return DenseContender(problem)
