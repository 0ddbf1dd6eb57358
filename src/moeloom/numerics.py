"""Arithmetic whose bits do not depend on layout. A leaf; used by the router and by the reference backend.

CPU libraries give one row of a product, or one element of an exponential, other bits when the shape around it changes:
small GEMMs take other kernels, long K loops are cut differently for one thread and for two, and vectorised functions
finish the tail of an array with scalar code. Measured with torch 2.13 and MKL on AVX-512 (``tests/test_numerics.py``):
fp32 rows are equal for every number of rows that is a multiple of 16 and for one or two threads as long as K <= 512;
K = 2048 differs, and so does M < 16. The functions here therefore keep to fixed shapes:

- :func:`matmul` cuts K into panels of 512 and adds them in order;
- :func:`rows_matmul` works on blocks of exactly 64 rows, the last one padded;
- :func:`exp` and :func:`sigmoid` see padded, single-thread pieces;
- :func:`fold_sum` adds in a fixed binary tree made of elementwise additions, which IEEE 754 rounds one way only.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest K of one GEMM call. Up to here the K loop is not cut by MKL, whatever the number of threads.
K_PANEL = 512
#: Rows of every GEMM over tokens of one rank, whose number differs between layouts. Measured at K=256, N=512 on two
#: cores: 213 GFLOP/s with 64 rows, 281 with 128, 147 with 32.
TOKEN_BLOCK = 64
#: Row counts of tail blocks are padded to a multiple of this.
ROW_STEP = 16
#: Elements of one elementwise call; torch runs at most this many on one thread without cutting.
_PIECE = 32768
_VECTOR = 64


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in: fp64 for fp64 operands, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, add_to: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` summed in the accumulation dtype.

    Args:
        a: [m, k], fp64, fp32 or bf16.
        b: [k, n], same dtype; on a CPU it may already be in the accumulation dtype.
        out: [m, n], any dtype; the result is rounded to it and written there.
        add_to: [m, n] in the accumulation dtype; the result is added into it. Not together with ``out``.

    Returns:
        ``out`` or ``add_to`` where given, otherwise a new tensor in the accumulation dtype.

    Determinism: K in panels of 512, added in order. On a CPU, products of bf16 operands are formed exactly in fp32.
    """
    if a.is_cuda and a.dtype == torch.bfloat16:
        total = torch.mm(a, b, out_dtype=torch.float32)
        return total if add_to is None and out is None else out.copy_(total) if add_to is None else add_to.add_(total)
    wide = accumulate_dtype(a.dtype)
    a, b = a.to(wide), b.to(wide)
    k = a.shape[1]
    if add_to is not None:
        total, start = add_to, 0
    elif not k:
        total, start = a.new_zeros(a.shape[0], b.shape[1]), 0
    else:
        direct = out is not None and out.dtype == wide
        total = torch.mm(a[:, :K_PANEL], b[:K_PANEL], out=out) if direct else torch.mm(a[:, :K_PANEL], b[:K_PANEL])
        start = K_PANEL
    for first in range(start, k, K_PANEL):
        total.addmm_(a[:, first : first + K_PANEL], b[first : first + K_PANEL])
    return total if out is None or out is total else out.copy_(total)


def token_blocks(num_tokens: int) -> list[tuple[int, int]]:
    """Cut ``num_tokens`` tokens into (first, end) pieces of at most :data:`TOKEN_BLOCK`."""
    return [(first, min(first + TOKEN_BLOCK, num_tokens)) for first in range(0, num_tokens, TOKEN_BLOCK)]


def rows_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` so that a row's bits depend on that row and on ``b`` alone, not on how many rows there are.

    Args:
        a: [m, k], any m including 0.
        b: [k, n], same dtype.

    Returns:
        [m, n] in the accumulation dtype.
    """
    out = torch.empty(a.shape[0], b.shape[1], dtype=accumulate_dtype(a.dtype), device=a.device)
    if a.is_cuda:
        return matmul(a, b, out=out) if a.shape[0] else out
    b = b.to(out.dtype)
    for first, end in token_blocks(a.shape[0]):
        if end - first == TOKEN_BLOCK:
            matmul(a[first:end], b, out=out[first:end])
        else:
            block = a.new_zeros(TOKEN_BLOCK, a.shape[1])
            block[: end - first] = a[first:end]
            out[first:end] = matmul(block, b)[: end - first]
    return out


def exp(x: Tensor) -> Tensor:
    """Return ``e**x`` elementwise; an element's bits do not depend on its place nor on the number of threads."""
    if x.is_cuda:
        return torch.exp(x)
    flat = x.reshape(-1)
    size = flat.numel()
    padded = -(-size // _VECTOR) * _VECTOR
    if padded != size:
        flat = torch.cat([flat, flat.new_zeros(padded - size)])
    out = torch.empty_like(flat)
    # All threads get pieces of whole vectors of what is long enough; the rest goes in pieces for one thread.
    threads = torch.get_num_threads()
    even = padded // (threads * _VECTOR) * (threads * _VECTOR) if padded >= threads * _PIECE else 0
    if even:
        torch.exp(flat[:even], out=out[:even])
    for first in range(even, padded, _PIECE):
        torch.exp(flat[first : first + _PIECE], out=out[first : first + _PIECE])
    return out[:size].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + e**-x)`` elementwise with the same promise as :func:`exp`."""
    return exp(-x).add_(1).reciprocal_()


def fold_sum(x: Tensor) -> Tensor:
    """Sum the last axis in a fixed binary tree: element i is added to element i + n/2, n a power of two.

    Args:
        x: [..., n], n >= 1.

    Returns:
        [...], same dtype. The order depends on n alone.
    """
    width = x.shape[-1]
    half = 1
    while 2 * half < width:
        half *= 2
    total = x[..., :half].clone()
    total[..., : width - half] += x[..., half:]
    while half > 1:
        half //= 2
        total[..., :half] += total[..., half : 2 * half]
    return total[..., 0]
