"""What the layer's equal bits rest on, measured on the CPU that runs the tests."""

from __future__ import annotations

import pytest
import torch

from moeloom.numerics import K_PANEL, ROW_STEP, fold_sum_, matmul, rows_matmul, sigmoid, silu, silu_backward


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("k", [1, 5, 64, 300, 512, 513, 2048])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 96, 512])
def test_rows_do_not_depend_on_number_place_or_threads(k, n, restore_threads):
    a, b = torch.randn(200, k), torch.randn(n, k).t()
    torch.set_num_threads(2)
    whole = rows_matmul(a, b)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, end in ((0, 1), (3, 9), (17, 145), (199, 200), (0, 200)):
            assert torch.equal(rows_matmul(a[first:end].clone(), b), whole[first:end])


@pytest.mark.parametrize("k,n", [(64, 96), (512, 40), (64, 24), (300, 72), (1500, 256), (1, 40), (40, 1), (2, 3)])
def test_block_products_do_not_depend_on_threads(k, n, restore_threads):
    for rows in range(ROW_STEP, 129, ROW_STEP):
        a, b, c = torch.randn(rows, k), torch.randn(k, n), torch.randn(rows, n)
        results = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            total = torch.zeros(k, n)
            results.append((matmul(a, b), matmul(a.t(), c, add_to=total)))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_long_sums_are_cut_into_panels():
    """The measured reason for K_PANEL: one call over a long K does depend on the number of threads or rows, or may."""
    a, b = torch.randn(64, 3 * K_PANEL), torch.randn(3 * K_PANEL, 64)
    want = a[:, :K_PANEL] @ b[:K_PANEL]
    for panel in (1, 2):
        rows = slice(panel * K_PANEL, (panel + 1) * K_PANEL)
        want.addmm_(a[:, rows], b[rows])
    assert torch.equal(matmul(a, b), want)


@pytest.mark.parametrize("size", [1, 31, 64, 1000, 32768, 40000, 70001, 200000])
def test_elementwise_functions_do_not_depend_on_place_or_threads(size, restore_threads):
    x, d = torch.randn(size) * 3, torch.randn(size)
    torch.set_num_threads(2)
    whole = [sigmoid(x), silu(x), silu_backward(d, x)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, end in ((0, size), (size // 3, size), (size // 2, size // 2 + 1), (0, 0)):
            part, d_part = x[first:end].clone(), d[first:end].clone()
            got = [sigmoid(part), silu(part), silu_backward(d_part, part)]
            assert all(torch.equal(g, w[first:end]) for g, w in zip(got, whole, strict=True))


def test_elementwise_functions_are_right():
    x = torch.cat([torch.linspace(-90, 90, 500), torch.tensor([0.0, -200.0, 200.0])])
    d = torch.randn(x.shape)
    exact = x.double()
    assert torch.allclose(sigmoid(x).double(), torch.sigmoid(exact), rtol=1e-6, atol=1e-38)
    assert torch.allclose(silu(x).double(), torch.nn.functional.silu(exact), rtol=1e-6, atol=1e-36)
    want = d.double() * torch.sigmoid(exact) * (1 + exact * (1 - torch.sigmoid(exact)))
    assert torch.allclose(silu_backward(d, x).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 17, 128, 1000])
def test_fold_sum(width):
    x = torch.randn(40, width, dtype=torch.float64)
    assert torch.allclose(fold_sum_(x.clone()), x.sum(-1))
    assert torch.equal(fold_sum_(x[7:9].clone()), fold_sum_(x.clone())[7:9])
    if width == 5:  # In fp32, ((a + e) + c) + (b + d): the documented order.
        y = torch.randn(3, 5)
        want = ((y[:, 0] + y[:, 4]) + y[:, 2]) + (y[:, 1] + y[:, 3])
        assert torch.equal(fold_sum_(y.clone()), want)


def test_products_without_terms_or_rows():
    assert matmul(torch.zeros(3, 0), torch.zeros(0, 4)).tolist() == [[0.0] * 4] * 3
    assert rows_matmul(torch.zeros(0, 5), torch.zeros(5, 4)).shape == (0, 4)


def test_bf16_products_are_summed_in_fp32():
    a, b = torch.randn(32, 700).bfloat16(), torch.randn(700, 24).bfloat16()
    exact = a.double() @ b.double()
    assert (matmul(a, b).double() - exact).abs().max() < 1e-4 * exact.abs().max()
