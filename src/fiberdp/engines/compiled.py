"""The engines' functions in C (see `_native`): what they take and return as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fiberdp import _native
from fiberdp._threads import usable_threads

if TYPE_CHECKING:
    from fiberdp.engines.parts import Block

Inner = Callable[["Block", "Block"], tuple[Tensor, Tensor]]
Products = Callable[..., tuple[Tensor, Tensor]]
Product = Callable[..., None]
Sum = Callable[..., None]
address, size = ctypes.c_void_p, ctypes.c_int64
LEAST_PRODUCTS = 2**20  # multiplications of `compiled_product`: with fewer, starting it costs what it saves


@cache
def compiled_gram(dtype: torch.dtype, device: str = "cpu") -> Inner | None:
    """One, other -> Sum_{s,t} <L_s, L'_t> <R_s, R'_t> and its part of s = t, float64 [b], the second 0 unless one is other.

    About half of the operations of the two products that it stands for, and none of their memory.  None: no compiler here, another
    device than the CPU, or another dtype than float32 and float64.
    """
    function = _function("gram", dtype, device, (*[address] * 5, *[size] * 5, ctypes.c_int, ctypes.c_int, address, address))

    def gram(one: Block, other: Block) -> tuple[Tensor, Tensor]:
        factors = [_rows(x, dtype) for x in (one.left, one.right, other.left, other.right)]
        (b, s, q), (_, t, p) = factors[0].shape, factors[3].shape
        found = torch.zeros(2, b, dtype=torch.float64, device="cpu")
        addresses = [x.data_ptr() for x in factors]
        function(*addresses, _strides(factors), b, s, t, q, p, one is other, usable_threads(), *(x.data_ptr() for x in found))
        return found[0], found[1]

    return gram if function else None


@dataclass(frozen=True)
class Windows:
    """Rows of p numbers that overlap in memory: row s begins at starts[s] (int64 [s]) and has pieces of `run` numbers, `jump` apart."""

    starts: Tensor
    size: int
    run: int
    jump: int


@cache
def compiled_products(dtype: torch.dtype, device: str = "cpu") -> Products | None:
    """Blocks -> Sum_k w_k Sum_s L^k_s R^k_s^T, [b, q, p], and its squared norms, float64 [b].

    The points stand side by side along s, so what is written is written once; norms are taken while it is in registers.  windows: R is
    [b, ...] memory, contiguous, that holds the rows of each example.  None: as above.
    """
    function = _function(
        "dense", dtype, device, (*[address] * 3, size, address, size, size, address, *[size] * 5, ctypes.c_int, address, address)
    )

    def products(blocks: Sequence[Block], windows: Windows | None = None) -> tuple[Tensor, Tensor]:
        lefts, rights, points = [_rows(block.left, dtype) for block in blocks], [block.right.to(dtype) for block in blocks], len(blocks)
        b, s, q = lefts[0].shape
        if windows is None:
            if len({x.stride() for x in rights}) > 1 or rights[0].stride(2) != 1:
                rights = [x.contiguous() for x in rights]
            p = rights[0].shape[2]
            windows = Windows(torch.arange(s, device="cpu") * rights[0].stride(1), p, p, 0)
        total = torch.empty(b, q, windows.size, dtype=dtype, device="cpu")
        squares = torch.empty(b, dtype=torch.float64, device="cpu")
        weights = (ctypes.c_double * points)(*(block.weight for block in blocks))
        function(
            _addresses(lefts), _addresses(rights), _strides(lefts), rights[0].stride(0),
            windows.starts.data_ptr(), windows.run, windows.jump, weights, points,
            b, s, q, windows.size, usable_threads(), total.data_ptr(), squares.data_ptr(),
        )  # fmt: skip
        return total, squares

    return products if function else None


@cache
def compiled_product(dtype: torch.dtype, device: str = "cpu") -> Product | None:
    """Pairs (L [n, q], R [n, p]) and out [q, p] -> out += Sum L^T R, in place, or out = that if `fresh`; out contiguous, pairs of one n.

    None: as above, or where torch's matrix products are as fast: they are MKL's, which uses half of the width of another maker's processor
    with AVX-512 (Zen 5: 200 GFLOP/s against 420 of this function, two threads).
    """
    function = _function("product", dtype, device, (*[address] * 5, *[size] * 4, ctypes.c_int, ctypes.c_int, address))
    if function is None or not _narrow_products():
        return None

    def product(pairs: Sequence[tuple[Tensor, Tensor]], out: Tensor, *, fresh: bool = False) -> None:
        lefts, rights = ([factor.contiguous() for factor in factors] for factors in zip(*pairs))
        n, points, (q, p) = len(lefts[0]), len(lefts), out.shape
        starts, weights = torch.arange(n, device="cpu") * p, (ctypes.c_double * points)(*[1.0] * points)
        strides = (size * (2 * points))(*(0, q) * points)
        function(
            _addresses(lefts), _addresses(rights), strides, starts.data_ptr(), weights, points, n, q, p, not fresh, usable_threads(),
            out.data_ptr(),
        )  # fmt: skip

    return product


def _narrow_products() -> bool:
    """Linux only, like the functions here."""
    words = b" ".join(_native.processor_lines(b"vendor_id", b"flags")).split()
    return torch.backends.mkl.is_available() and b"GenuineIntel" not in words and b"avx512f" in words


@cache
def compiled_sum(dtype: torch.dtype, device: str = "cpu") -> Sum | None:
    """rows [b, n], factors [b], out [n] -> out += Sum_i factor_i row_i, in place, or out = that if `fresh`; rows and out contiguous.

    At the speed of memory, which is twice that of a product of a matrix and a vector by torch's library.  None: as above.
    """
    function = _function("sum", dtype, device, (address, address, size, size, ctypes.c_int, ctypes.c_int, address))

    def weighted(rows: Tensor, factors: Tensor, out: Tensor, *, fresh: bool = False) -> None:
        function(rows.data_ptr(), factors.contiguous().data_ptr(), *rows.shape, not fresh, usable_threads(), out.data_ptr())

    return weighted if function else None


def _function(name: str, dtype: torch.dtype, device: str, argtypes: tuple[Any, ...]) -> Any:
    suffix = {torch.float32: "float", torch.float64: "double"}.get(dtype)
    return _native.function("_outer", f"{name}_{suffix}", argtypes, "-ffp-contract=fast") if device == "cpu" and suffix else None


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with a dense last dimension, in the type that the function reads."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (address * len(tensors))(*(x.data_ptr() for x in tensors))


def _strides(tensors: Sequence[Tensor]) -> Any:
    return (size * (2 * len(tensors)))(*(stride for x in tensors for stride in x.stride()[:2]))
