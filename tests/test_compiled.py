"""The engines' functions in C: exact sums and norms for every shape, stride and kind of example; torch's way gives the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from fiberdp.engines import parts
from fiberdp.engines.compiled import Windows, compiled_gram, compiled_product, compiled_products, compiled_sum
from fiberdp.engines.layers import conv
from fiberdp.engines.parts import Block, Outer
from fiberdp.engines.sums import NORM_SLACK, add_weighted_rows_

pytestmark = pytest.mark.skipif(compiled_gram(torch.float32) is None, reason="no C compiler with OpenMP here")
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-13}
THREADS = (1, 2, 3)


def each_number_of_threads():
    before = torch.get_num_threads()
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def everywhere(monkeypatch):
    """Weighted products are compiled on every processor, not only where that pays."""
    compiled_product.cache_clear()
    monkeypatch.setattr("fiberdp.engines.compiled._narrow_products", lambda: True)
    yield
    compiled_product.cache_clear()


def drawn(seed: int, dtype: torch.dtype, points: int) -> list[Block]:
    """Factors of sizes around those at which tiles, blocks, chunks, panels and depths end; some are views of larger memory."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    b = rng.choice((1, 2, 5))
    s = rng.choice((2, 3, 4, 5, 8, 31, 65, 130, 300))
    q, p = (rng.choice((1, 2, 3, 5, 6, 7, 15, 16, 17, 33, 96, 193, 200, 800)) for _ in "LR")

    def factor(n: int) -> torch.Tensor:
        way = rng.randrange(4)
        if way == 0:  # a slice of a wider tensor
            return torch.randn(b, s, n + 3, generator=generator, dtype=dtype)[:, :, 2 : 2 + n]
        if way == 1:  # positions first
            return torch.randn(s, b, n, generator=generator, dtype=dtype).transpose(0, 1)
        if way == 2:  # entries are not neighbours
            return torch.randn(b, n, s, generator=generator, dtype=dtype).transpose(1, 2)
        return torch.randn(b, s, n, generator=generator, dtype=dtype)

    return [Block(rng.uniform(-2, 2), factor(q), factor(p)) for _ in range(points)]


def gradients(blocks: list[Block]) -> torch.Tensor:
    """[b, q, p], float64, as the sum is defined."""
    return sum(block.weight * torch.einsum("bsq,bsp->bqp", block.left.double(), block.right.double()) for block in blocks)  # pyright: ignore


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("points", [1, 2, 3])
def test_products_and_norms_of_any_factors(dtype, points):
    products, gram = compiled_products(dtype), compiled_gram(dtype)
    for seed in range(60):
        blocks = drawn(seed, dtype, points)
        right = gradients(blocks)
        norms = right.square().sum((1, 2))
        size = sum(abs(block.weight) * block.left.double().norm(dim=(1, 2)) * block.right.double().norm(dim=(1, 2)) for block in blocks)
        total, squares = products(blocks)
        assert (total - right).abs().amax((1, 2)).le(TOLERANCE[dtype] * size).all()
        assert (squares - norms).abs().le(TOLERANCE[dtype] * size**2).all()
        assert squares == pytest.approx(total.double().square().sum((1, 2)), rel=1e-6 if dtype == torch.float32 else 1e-13)
        pair = blocks[0], blocks[-1]
        inner, diagonal = gram(*pair)
        lefts, rights = (
            torch.einsum("bsx,btx->bst", x.double(), y.double()) for x, y in ((pair[0].left, pair[1].left), (pair[0].right, pair[1].right))
        )
        scale = lefts.norm(dim=(1, 2)) * rights.norm(dim=(1, 2))
        assert (inner - (lefts * rights).sum((1, 2))).abs().le(TOLERANCE[dtype] * scale).all()
        expected = (lefts * rights).diagonal(dim1=1, dim2=2).sum(1) if points == 1 else torch.zeros(len(inner))
        assert (diagonal - expected).abs().le(TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_parts_are_the_same_by_torch(dtype, monkeypatch):
    for seed in range(40):
        outer = Outer(drawn(seed, dtype, 1 + seed % 3))
        compiled = outer.dense(), outer.squared_norms()
        with monkeypatch.context() as patch:
            patch.setattr(parts, "compiled_gram", lambda *_: None)
            patch.setattr(parts, "compiled_products", lambda *_: None)
            by_torch = outer.dense(), outer.squared_norms()
        assert by_torch[0].squares is None
        size = float(by_torch[0].gradient.abs().max())
        assert torch.allclose(compiled[0].gradient, by_torch[0].gradient, rtol=0, atol=20 * TOLERANCE[dtype] * size)
        assert torch.allclose(compiled[0].squared_norms(), by_torch[0].squared_norms(), rtol=20 * TOLERANCE[dtype])
        assert torch.allclose(compiled[1], by_torch[1], rtol=50 * TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 5), (8, 8)])
@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 2)), ((3, 2), (2, 0))])
@pytest.mark.parametrize("channels", [1, 3, 16, 17])
def test_convolutions_read_windows_where_they_lie(kernel, stride, padding, channels, monkeypatch):
    """Against autograd, an example at a time, two points of two copies each; and against torch's way."""
    torch.manual_seed(0)
    b, copies, q = 3, 2, 7
    x = [torch.randn(b * copies, channels, 9, 11, dtype=torch.float64) for _ in "12"]
    shape = F.conv2d(x[0], torch.zeros(q, channels, *kernel, dtype=torch.float64), stride=stride, padding=padding).shape
    outputs = [(weight, torch.randn(shape, dtype=torch.float64)) for weight in (0.3, -1.7)]
    weight = torch.zeros(q, channels, *kernel, dtype=torch.float64, requires_grad=True)
    right = []
    for i in range(b):
        rows = slice(i * copies, (i + 1) * copies)
        loss = sum(w * (F.conv2d(a[rows], weight, stride=stride, padding=padding) * g[rows]).sum() for a, (w, g) in zip(x, outputs))
        right.append(torch.autograd.grad(loss, weight)[0])  # pyright: ignore
    geometry = conv.Geometry(stride, padding, (1, 1), 1)
    found = conv.by_windows(x, outputs, weight.shape, geometry, b)
    assert found.squares is not None
    monkeypatch.setattr(conv, "compiled_products", lambda *_: None)
    by_torch = conv.by_windows(x, outputs, weight.shape, geometry, b)
    for one in (found, by_torch):
        assert torch.allclose(one.gradient, torch.stack(right), atol=1e-11)
        assert torch.allclose(one.squared_norms(), torch.stack(right).square().sum((1, 2, 3, 4)), rtol=1e-12)


def test_an_example_that_is_not_finite_spoils_no_other():
    left, right = torch.randn(4, 5, 7), torch.randn(4, 5, 9)
    left[1, 2, 3], right[2, 0, 0] = torch.nan, torch.inf
    blocks = [Block(1.0, left, right)]
    total, squares = compiled_products(torch.float32)(blocks)
    inner, _ = compiled_gram(torch.float32)(blocks[0], blocks[0])
    for norms in (squares, inner):
        assert norms.isfinite().tolist() == [True, False, False, True]
    assert total[[0, 3]].isfinite().all()
    assert torch.allclose(total[[0, 3]].double(), gradients(blocks)[[0, 3]], atol=1e-5)


def test_threads_and_other_examples_change_no_bit():
    blocks = drawn(7, torch.float32, 2)
    blocks = [Block(x.weight, x.left.repeat(9, 1, 1), x.right.repeat(9, 1, 1)) for x in blocks]
    found = [
        (*compiled_products(torch.float32)(blocks), *compiled_gram(torch.float32)(blocks[0], blocks[0])) for _ in each_number_of_threads()
    ]
    alone = [Block(x.weight, x.left[:1], x.right[:1]) for x in blocks]
    for total, squares, inner, diagonal in found:
        assert torch.equal(total, found[0][0])
        assert torch.equal(squares, found[0][1])
        assert torch.equal(inner, found[0][2])
        assert torch.equal(total[:1], compiled_products(torch.float32)(alone)[0])
        assert torch.equal(diagonal[:1], compiled_gram(torch.float32)(alone[0], alone[0])[1])


def test_windows_may_overlap():
    """Rows of 4 numbers, one number apart: a moving window over memory that is 10 numbers an example."""
    memory, left = torch.arange(20.0).view(2, 10), torch.randn(2, 7, 3)
    total, _ = compiled_products(torch.float32)([Block(1.0, left, memory)], Windows(torch.arange(7), 4, 4, 0))
    assert torch.allclose(total, torch.einsum("bsq,bsp->bqp", left, memory.unfold(1, 4, 1)), atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fresh", [False, True])
def test_weighted_sums_of_rows(dtype, fresh):
    """Sizes around those at which pieces and groups of rows end; what `out` held counts only if it is not fresh."""
    generator = torch.Generator().manual_seed(0)
    for b in (0, 1, 7, 8, 9, 16, 33):
        for n in (1, 15, 1023, 1024, 1025, 5000):
            rows, factors, held = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((b, n), (b,), (n,)))
            right = (0 if fresh else held.double()) + factors.double() @ rows.double()
            size = held.double().abs() + factors.double().abs() @ rows.double().abs()
            out = torch.full_like(held, torch.nan) if fresh else held.clone()
            add_weighted_rows_(out, rows, factors, fresh=fresh)
            assert (out - right).abs().le(TOLERANCE[dtype] * size).all()


def test_weighted_sums_of_rows_by_any_number_of_threads():
    rows, factors = torch.randn(37, 10_001), torch.randn(37)
    found = [torch.empty(10_001) for _ in THREADS]
    for _, out in zip(each_number_of_threads(), found):
        compiled_sum(torch.float32)(rows, factors, out, fresh=True)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_weighted_sums_of_other_memory():
    """Rows or a result that are not dense, or of a type the function does not know, are torch's."""
    rows, factors = torch.randn(5, 12), torch.randn(5)
    for given in (torch.randn(12, 5).t(), rows[:1].expand(5, 12), torch.randn(5, 24)[:, ::2]):
        out = torch.ones(12)
        add_weighted_rows_(out, given, factors)
        assert torch.allclose(out, 1 + factors @ given, atol=1e-5)
    strided = torch.zeros(24)
    add_weighted_rows_(strided[::2], rows, factors)
    assert torch.allclose(strided[::2], factors @ rows, atol=1e-5)
    assert not strided[1::2].any()
    short = torch.zeros(12, dtype=torch.bfloat16)
    add_weighted_rows_(short, rows.bfloat16(), factors.bfloat16(), fresh=True)
    assert torch.allclose(short.float(), factors @ rows, atol=0.3)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("everywhere")
def test_weighted_products_of_any_factors(dtype, monkeypatch):
    """By the compiled function, wherever torch's is as fast too, and by torch; what `out` held counts only if it is not fresh."""
    monkeypatch.setattr(parts, "LEAST_PRODUCTS", 0)
    for by_torch in (False, True):
        if by_torch:
            monkeypatch.setattr(parts, "compiled_product", lambda *_: None)
        for seed in range(60):
            blocks = drawn(seed, dtype, 1 + seed % 3)
            if seed % 7 == 0:  # a parameter that is used twice, at other positions
                blocks.append(Block(0.5, *(torch.cat([x, x[:, :1]], 1) for x in (blocks[0].left, blocks[0].right))))
            factors = torch.rand(len(blocks[0].left), dtype=dtype)
            right = torch.einsum("b,bqp->qp", factors.double(), gradients(blocks))
            size = sum(abs(block.weight) * float(block.left.double().norm() * block.right.double().norm()) for block in blocks)
            held = torch.randn(right.shape, dtype=dtype)
            for fresh in (False, True):
                out = torch.full_like(held, torch.nan) if fresh else held.clone()
                Outer(blocks).add_weighted_(out, factors, fresh=fresh)
                assert (out - right - (0 if fresh else held)).abs().max() <= TOLERANCE[dtype] * (size + 4)


@pytest.mark.usefixtures("everywhere")
def test_weighted_products_by_any_number_of_threads():
    pairs = [(torch.randn(500, 205), torch.randn(500, 70)) for _ in "12"]
    found = [torch.empty(205, 70) for _ in THREADS]
    for _, out in zip(each_number_of_threads(), found):
        compiled_product(torch.float32)(pairs, out, fresh=True)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("positions", [300, 4096, 16_384])
@pytest.mark.usefixtures("everywhere")
def test_weighted_products_of_like_positions_stay_within_the_clip(positions):
    """An example whose positions are all alike: in one long float32 sum the roundings add up (by 3.5e-6 at 4,096)."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        left, right = (torch.rand(1, 1, n, generator=generator).expand(1, positions, n).contiguous() for n in (16, 64))
        norm = positions * float(left[0, 0].double().norm() * right[0, 0].double().norm())
        out = torch.empty(16, 64)
        Outer([Block(1.0, left, right)]).add_weighted_(out, torch.tensor([1 / (norm * (1 + NORM_SLACK[torch.float32]))]), fresh=True)
        assert float(out.double().norm()) <= 1
