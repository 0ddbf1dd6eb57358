"""GEMMs over the rows of all experts: torch's grouped GEMM where it is native, else a loop over experts.

The grouped GEMM (``torch.nn.functional.grouped_mm``) takes bf16 operands and gives bf16 results, from sums in fp32. It
needs row strides that are multiples of 16 bytes and fewer than 1024 groups. Torch has a kernel for it on GPUs of
compute capability 9.x and 10.x; on other devices torch itself loops over the groups, and our loop does better: it
delivers wide results where they are wanted, and on a CPU without bf16 arithmetic it is 11 times faster (4096 rows,
K=128, N=256, 8 experts, one thread of an AMD EPYC: 4.9 ms against 54.3 ms).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moeloom.numerics import accumulate_dtype

#: Compute capabilities (major) for which torch has a grouped GEMM kernel.
_NATIVE_MAJORS = (9, 10)
#: Bytes that row strides and addresses of its operands must be multiples of.
_ALIGNMENT = 16
#: More groups than this are refused by it.
_MOST_GROUPS = 1023


def grouped_mm_is_native(x: Tensor, num_experts: int, *widths: int) -> bool:
    """Tell whether the grouped GEMM takes operands like ``x`` with rows of these widths, by a kernel of its own."""
    if x.dtype != torch.bfloat16 or not x.is_cuda or not _grouped_mm:
        return False
    aligned = all(width * x.element_size() % _ALIGNMENT == 0 for width in widths)
    native = torch.cuda.get_device_capability(x.device)[0] in _NATIVE_MAJORS
    return aligned and native and num_experts <= _MOST_GROUPS


class ExpertRows:
    """Rows of the experts of this rank: those of expert 0, those of expert 1, ...; then possibly more, which are inert.

    Args:
        ends: int32 [E], row after the last one of each expert.
        grouped: use torch's grouped GEMM. Without it the host reads ``ends`` once.
        counts: rows of each expert, if the host knows them.
    """

    def __init__(self, ends: Tensor, *, grouped: bool, counts: list[int] | None = None) -> None:
        self._ends, self._grouped, self._counts = ends, grouped, counts

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [E], rows of each expert, without a wait for the device."""
        return self._ends.diff(prepend=self._ends.new_zeros(1)).to(torch.int64)

    def products(self, rows: Tensor, weights: Tensor, *, wide: bool = False) -> Tensor:
        """Return every row times the weight of its expert; rows that belong to no expert are unwritten memory.

        Args:
            rows: [M, k] operand dtype, contiguous.
            weights: [E, k, n], a contiguous weight or its transpose.
            wide: deliver the accumulation dtype; the grouped GEMM rounds to the operand dtype all the same.

        Returns:
            [M, n], summed in the accumulation dtype and rounded once.
        """
        if self._grouped and rows.shape[0]:
            return _grouped_mm(rows, _aligned(weights), offs=self._ends)
        dtype = accumulate_dtype(rows.dtype) if wide else rows.dtype
        out = torch.empty(rows.shape[0], weights.shape[2], dtype=dtype, device=rows.device)
        for expert, first, end in self._spans():
            _product(rows[first:end], weights[expert], out[first:end])
        return out

    def outer_sums(self, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left^T . right`` over the rows of each expert; exactly 0 for experts without rows.

        Args:
            left: [M, a] operand dtype, contiguous.
            right: [M, b] likewise.

        Returns:
            [E, a, b]: the operand dtype from the grouped GEMM, otherwise the accumulation dtype.
        """
        experts = self._ends.shape[0]
        if self._grouped and left.shape[0]:
            sums = _grouped_mm(left.t(), right, offs=self._ends)
            if not _empty_groups_are_zero(left.device):
                sums.masked_fill_((self.rows_per_expert == 0)[:, None, None], 0)
            return sums
        dtype = left.dtype if self._grouped else accumulate_dtype(left.dtype)
        sums = torch.zeros(experts, left.shape[1], right.shape[1], dtype=dtype, device=left.device)
        for expert, first, end in self._spans():
            _product(left[first:end].t(), right[first:end], sums[expert])
        return sums

    def _spans(self) -> list[tuple[int, int, int]]:
        """Return (expert, first row, row after the last) of every expert that has rows."""
        if self._counts is None:
            self._counts = self.rows_per_expert.tolist()
        spans, first = [], 0
        for expert, count in enumerate(self._counts):
            if count:
                spans.append((expert, first, first + count))
            first += count
        return spans


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in the accumulation dtype; zero where the inner size is zero."""
    wide = accumulate_dtype(a.dtype)
    if not a.numel() or not b.numel():
        return torch.zeros(a.shape[0], b.shape[1], dtype=wide, device=a.device)
    if a.dtype == torch.bfloat16 and a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a.to(wide), b.to(wide))


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write ``a @ b`` to ``out``, summed in the accumulation dtype and rounded once."""
    if out.dtype == a.dtype == accumulate_dtype(a.dtype):
        torch.mm(a, b, out=out)
    else:
        out.copy_(wide_product(a, b))


def _aligned(weights: Tensor) -> Tensor:
    """Return the weights at an address that the grouped GEMM takes. Views into a flat buffer may start anywhere."""
    return weights if weights.storage_offset() * weights.element_size() % _ALIGNMENT == 0 else weights.clone()


def _empty_groups_are_zero(device: torch.device) -> bool:
    """Tell whether the grouped GEMM writes zeros for a sum over no rows.

    The kernel for capability 9.x does, which ``tests/test_torch_backend.py`` checks on the device. That for 10.x is
    reported not to (pytorch issue 172439).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
