"""Arithmetic whose bits do not depend on layout. A leaf; used by the router and by the reference backend.

CPU libraries give one row of a product, or one element of an exponential, other bits when the shape around it changes:
small GEMMs take other kernels, long K loops are cut differently for one thread and for two, and vectorised functions
finish the tail of an array with scalar code. Measured with torch 2.13 and MKL on AVX-512 (``tests/test_numerics.py``):
fp32 rows are equal for every number of rows that is a multiple of 16 and for one or two threads as long as K <= 512;
K = 2048 differs, and so does M < 16. The functions here therefore keep to fixed shapes:

- :func:`matmul` cuts K into panels of 512 and adds them in order;
- a product with a single row, or with columns that are no multiple of 16, is padded: BLAS has other code for vectors,
  and cuts columns between threads (AVX2: 24, 40, 72 and 104 columns differ between one thread and three);
- :func:`rows_matmul` works on blocks of exactly 128 rows, the last one padded;
- :func:`sigmoid`, :func:`silu` and :func:`silu_backward` are run on whole vectors only;
- :func:`fold_sum_` adds in a fixed binary tree made of elementwise additions, which IEEE 754 rounds one way only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Largest K of one GEMM call. Up to here the K loop is not cut by MKL, whatever the number of threads.
K_PANEL = 512
#: Rows of every GEMM over tokens of one rank, whose number differs between layouts. Measured at K=256, N=512 on two
#: cores: 191 GFLOP/s with 32 rows, 236 with 64, 274 with 128, 292 with 256 (benchmarks/reference_cpu.py).
TOKEN_BLOCK = 128
#: Row counts of tail blocks are padded to a multiple of this.
ROW_STEP = 16
#: Columns of a product are padded to a multiple of this: MKL cuts them between threads, and on AVX2 the pieces of 24,
#: 40, 72 or 104 columns take other kernels with three or four threads than with one.
COLUMN_STEP = 16
#: Elements that torch gives to one thread without cutting (its grain size).
_PIECE = 32768
#: Elements; a multiple of what vectorised loops take at once on every CPU (two registers of 16 fp32 at most).
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
    if not a.is_cuda and (a.shape[0] == 1 or b.shape[1] % COLUMN_STEP):
        return _padded_matmul(a, b, out=out, add_to=add_to)
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


def _padded_matmul(a: Tensor, b: Tensor, *, out: Tensor | None, add_to: Tensor | None) -> Tensor:
    """Do :func:`matmul` with a single row, or columns that are no multiple of 16, padded with zeros."""
    m, n = a.shape[0], b.shape[1]
    fat_a = a if m > 1 else torch.cat([a, a.new_zeros(ROW_STEP - 1, a.shape[1])])
    more = -n % COLUMN_STEP
    fat_b = torch.cat([b, b.new_zeros(b.shape[0], more)], dim=1) if more else b
    total = matmul(fat_a, fat_b)[:m, :n]
    if add_to is not None:
        return add_to.add_(total)
    return total.contiguous() if out is None else out.copy_(total)


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


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + e**-x)`` elementwise; an element's bits depend on its value alone."""
    return _in_whole_vectors(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """Return ``x / (1 + e**-x)`` elementwise; an element's bits depend on its value alone."""
    return _in_whole_vectors(torch.nn.functional.silu, x)


def silu_backward(d_out: Tensor, x: Tensor) -> Tensor:
    """Return ``d_out * s * (1 + x * (1 - s))`` with s = sigmoid(x); an element's bits depend on its values alone."""
    return _in_whole_vectors(torch.ops.aten.silu_backward, d_out, x)


def _in_whole_vectors(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply an elementwise function so that vector code, never the scalar code for tails, sees every element.

    Torch gives each thread an equal share of a long array; the array is cut so that every share is whole vectors.
    """
    first = inputs[0]
    if first.is_cuda:
        return function(*inputs)
    size = first.numel()
    whole = -(-size // _VECTOR) * _VECTOR
    flat = [x.reshape(-1) for x in inputs]
    if whole != size:
        flat = [torch.cat([x, x.new_zeros(whole - size)]) for x in flat]
    threads = torch.get_num_threads()
    even = whole // (threads * _VECTOR) * (threads * _VECTOR) if whole >= threads * _PIECE else 0
    cuts = [*([even] if even else []), *([_PIECE] * ((whole - even) // _PIECE))]
    cuts += [whole - sum(cuts)] if sum(cuts) < whole else []
    parts = [function(*pieces) for pieces in zip(*(x.split(cuts) for x in flat), strict=True)] if cuts else flat[:1]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:size].view(first.shape)


def fold_sum_(x: Tensor) -> Tensor:
    """Sum the last axis in a fixed binary tree: element i + n/2 is added to element i, n a power of two.

    Args:
        x: [..., n], n >= 1; overwritten.

    Returns:
        [...], same dtype. The order depends on n alone.
    """
    width = x.shape[-1]
    half = 1
    while 2 * half < width:
        half *= 2
    x[..., : width - half] += x[..., half:]
    while half > 1:
        half //= 2
        x[..., :half] += x[..., half : 2 * half]
    return x[..., 0]
