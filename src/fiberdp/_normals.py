"""How the numbers of a stream are computed: words by AES-256 in counter mode, normals from words, and normals that are rounded exactly.

By `_random.c` where a C compiler is at hand, and by the cryptography library and torch elsewhere.

    normals    Box-Muller in float64 on segments of 2S elements (see `_random.py` for which word becomes which element)
    rounded    scale z to the nearest whole number, for the real z of real uniforms: the words are their first bits, and where those do
               not decide, further bits are drawn and the pair is computed once more in intervals that hold it for certain
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fiberdp import _native

S = 512  # pairs in a segment; changing it changes every seeded run
_ZEROS = bytes(1 << 16)  # plaintext of the counter mode, small enough to stay in the nearest cache
ERROR = 2.0**-44  # of a float64 normal, at the very most; both ways of computing it are some hundred times better
LEVELS = 16  # of 64 further bits
LARGEST = 2.0**47  # scale: beyond, a float64 could not hold scale z to a fraction

_BYTES, _SIZE, _ADDRESS, _DOUBLE = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def fill(key: bytes, high: int, first: int, blocks: int, buffer: bytearray, words: Tensor) -> None:
    """Keystream from counter block (high, first) on into `buffer`, 16 bytes longer than `blocks`, whose memory `words` shares."""
    compiled = compiled_keystream()
    if compiled:
        compiled(key, high, first, blocks, words.data_ptr())
    else:
        encrypt(key, high, first, memoryview(buffer)[: 16 * blocks + 16])


def encrypt(key: bytes, high: int, first: int, out: memoryview) -> None:
    """The keystream from counter block (high, first) on, as many whole blocks as leave room in `out` for one more."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(high.to_bytes(8, "big") + first.to_bytes(8, "big"))).encryptor()
    for at in range(0, len(out) - 16, len(_ZEROS)):
        zeros = _ZEROS[: len(out) - 16 - at]
        # update_into wants room for one block beyond what it writes
        encryptor.update_into(zeros, out[at : at + len(zeros) + 16])


def box_muller(words: Tensor, scale: float, radius: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Fill cos and sin [n, S], the two halves of each segment, from words [n, 2, S]; words[:, 0] is overwritten, radius is scratch.

    The cost is that of the logarithm, the cosine and the sine.  1/sqrt and a division are quicker than torch's own sqrt (4 to 5 % of
    the whole), and u = 1 is no exception: scale / (1 / sqrt(0)) = 0.
    """
    radius.copy_(words[:, 0].bitwise_or_(1)).abs_().mul_(2.0**-63).log_().mul_(-2.0).rsqrt_()
    torch.div(torch.tensor(scale, dtype=torch.float64, device="cpu"), radius, out=radius)
    sin.copy_(words[:, 1]).mul_(math.pi * 2.0**-63)
    torch.cos(sin, out=cos).mul_(radius)
    sin.sin_().mul_(radius)


@cache
def compiled_noise(dtype: torch.dtype) -> Callable[..., None] | None:
    """(key, high, first segment, segments, scale, add, address, threads): words and normals in one go, to or onto what is there."""
    name = {torch.float32: "noise_float", torch.float64: "noise_double"}[dtype]
    function = _function(name, *[_BYTES, _SIZE, _SIZE, _SIZE, _DOUBLE, ctypes.c_int, _ADDRESS, ctypes.c_int])
    return function if compiled_keystream() else None


@cache
def compiled_normals(dtype: torch.dtype) -> Callable[[int, int, float, int], None] | None:
    """The same as `box_muller`, from the addresses of words and normals, in the order of the stream."""
    return _function("normals_float" if dtype == torch.float32 else "normals_double", _ADDRESS, _SIZE, _DOUBLE, _ADDRESS)


@cache
def compiled_rounding() -> Callable[[int, int, float, float, int], None] | None:
    """(words, segments, scale, error, rounded): see `Scratch.rounded`."""
    return _function("rounded_normals", _ADDRESS, _SIZE, _DOUBLE, _DOUBLE, _ADDRESS)


@cache
def compiled_keystream() -> Callable[[bytes, int, int, int, int], None] | None:
    """`encrypt` by the processor's AES instructions; None where there are none.

    Raises RuntimeError if it disagrees with the library: then the compiler or the processor is broken, and no noise may come of it.
    """
    function = _function("keystream", _BYTES, _SIZE, _SIZE, _SIZE, _ADDRESS)
    if function is None:
        return None
    key, high, first, expected = bytes(range(32)), 0x0123456789ABCDEF, 2**32 - 20, bytearray(16 * 41)
    found = bytearray(16 * 40)
    encrypt(key, high, first, memoryview(expected))
    function(key, high, first, 40, ctypes.addressof(ctypes.c_char.from_buffer(found)))
    if found != expected[: len(found)]:
        raise RuntimeError(
            "AES: the compiled cipher and the cryptography library must agree, because one of them is wrong and the noise is made of it. "
            "Remove ~/.cache/fiberdp, and distrust this machine if that does not help."
        )
    return function


def _function(name: str, *argtypes: Any) -> Any:
    return _native.function("_random", name, argtypes)


class Scratch:
    """Work memory of one thread at a time, kept between calls: fresh pages would cost as much as the arithmetic."""

    def __init__(self, segments: int) -> None:
        self.segments = segments
        self.buffer = bytearray(16 * S * segments + 16)
        # tensors born in inference mode could not be written to outside it
        with torch.inference_mode(False):
            self.words = torch.frombuffer(self.buffer, dtype=torch.int64)[: 2 * S * segments].view(segments, 2, S)
            self.pairs = torch.empty(3, segments, S, dtype=torch.float64, device="cpu")
            # once the words are used up, their memory takes the normals
            self.ordered = {dtype: self.words.view(dtype).view(-1)[: 2 * S * segments] for dtype in (torch.float32, torch.float64)}
            self.apart = {dtype: self.pairs.view(-1).view(dtype)[: 2 * S * segments] for dtype in (torch.float32, torch.float64)}

    def normals(self, segments: int, scale: float, dtype: torch.dtype) -> Tensor:
        """The normals of the words in `buffer`, in the order of the stream."""
        compiled = compiled_normals(dtype)
        if compiled is not None:
            z = self.apart[dtype][: 2 * S * segments]
            compiled(self.words.data_ptr(), segments, scale, z.data_ptr())
            return z
        radius, cos, sin = self.pairs[:, :segments]
        box_muller(self.words[:segments], scale, radius, cos, sin)
        z = self.ordered[dtype][: 2 * S * segments]
        z.view(segments, 2, S)[:, 0].copy_(cos)
        z.view(segments, 2, S)[:, 1].copy_(sin)
        return z

    def rounded(self, segments: int, scale: float) -> Tensor:
        """scale z to the nearest whole number, float64, in the order of the stream; NaN where the words alone do not decide."""
        words, out = self.words[:segments], self.apart[torch.float64][: 2 * S * segments]
        compiled = compiled_rounding()
        if compiled is not None:
            compiled(words.data_ptr(), segments, scale, ERROR, out.data_ptr())
            return out
        below = (words[:, 0] | 1).abs_().sub_(1).double()
        radius, cos, sin = self.pairs[:, :segments]
        box_muller(words, scale, radius, cos, sin)
        slack = below.mul_(radius).reciprocal_().mul_(2 * scale * scale).add_(scale * ERROR)
        for y in (cos, sin):
            n = y.round()
            y.copy_(n.masked_fill_((y - n).abs_().lt(0.5 - slack).logical_not_(), math.nan))
        return torch.stack((cos, sin), 1).flatten()


idle: list[Scratch] = []  # as many as there ever were threads at once


@contextmanager
def scratch(segments: int) -> Iterator[Scratch]:
    """Lend one that is big enough."""
    try:
        lent = idle.pop()
    except IndexError:
        lent = Scratch(segments)
    if lent.segments < segments:
        lent = Scratch(segments)
    try:
        yield lent
    finally:
        idle.append(lent)


def decided(scale: float, a: int, b: int, sine: bool, more: Callable[[int], tuple[int, int]]) -> int:
    """round(scale z) of the pair of words a and b, its cosine or its sine, however many bits that takes.

    more(level): 64 further bits of u and of phi.  Every operation is one on intervals, rounded outwards (mpmath): the number that both ends
    round to is the right one.
    """
    from mpmath.libmp import fhalf, mpf_add, to_int

    u, phi, bits = abs(a | 1) >> 1, b, 62  # u / 2^62 and pi phi / 2^63 are the lower ends of cells of one unit
    for level in range(LEVELS):
        with _intervals() as iv:
            iv.prec = bits + 64
            if u:
                radius = iv.sqrt(-2 * iv.log(iv.mpf([u, u + 1]) / 2**bits))
                angle = iv.mpf([phi, phi + 1]) * iv.pi / 2 ** (bits + 1)
                y = scale * radius * (iv.sin(angle) if sine else iv.cos(angle))
                low, high = (int(to_int(mpf_add(end, fhalf), "f")) for end in y._mpi_)  # pyright: ignore
                if low == high:
                    return low
        further_u, further_phi = more(level)
        u, phi, bits = u << 64 | further_u, phi << 64 | further_phi, bits + 64
    raise RuntimeError(f"rounding undecided after {bits} bits: that happens once in 2**900 numbers, so the generator is broken.")


@contextmanager
def _intervals() -> Iterator[Any]:
    """mpmath's interval arithmetic, whose precision is a global variable."""
    from mpmath import iv  # late: it takes a tenth of a second

    with _precision:
        kept = iv.prec
        try:
            yield iv
        finally:
            iv.prec = kept


_precision = Lock()
