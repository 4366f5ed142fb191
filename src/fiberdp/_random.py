"""Every random number of a run, addressed: AES-256 in counter mode, indexed by (stream, step, position).

    block_j = AES-256_key( stream : 2 bytes | step : 6 bytes | j : 8 bytes ),   big-endian, j = 0, 1, ...
    word_i  = half i mod 2 of block_{i // 2}, 64 bits, little-endian

Nothing is consumed in order, so any slice [start, stop) of any step can be drawn by whoever needs it (a
resumed run, a rank, a micro-batch, a block-wise update) and is the same slice.  Normals are Box-Muller in
float64, in segments of 2S elements, S = 512; with a_p = word p and b_p = word S + p of the segment, p < S,

    u_p     = |a_p or 1| / 2**63      a midpoint of 2**62 equal cells of (0, 1): never 0, so |z| reaches 9.34
    phi_p   = pi b_p / 2**63          words are read signed: phi in [-pi, pi)
    z_p     = sqrt(-2 log u_p) cos(phi_p)
    z_{S+p} = sqrt(-2 log u_p) sin(phi_p)

A 24-bit u would end the tail at 5.8 standard deviations, which a small delta notices.  Normals are computed by `_random.c` where a C
compiler is at hand, and by torch elsewhere (some 5 times slower).  On one machine they are equal to the last bit for any slicing, any
vector length and any number of threads: there is one way of computing them, and which thread computes a segment does not show.  By the C
file they are equal on all machines; by torch, the words are equal and the normals agree to about 1e-15.

Guarantee: with `Keys.secret()` the words cannot be told from independent fair bits without the key, as long
as AES-256 is a good block cipher.  `Keys.seeded` is reproducible, and private against nobody who can guess
the seed.  A (stream, step) must be read through only one of `bits`, `uniform`, `normal` and `seed`: they are
readings of the same words, so two of them are dependent.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor
from torch.autograd.graph import increment_version

from fiberdp import _native
from fiberdp._threads import one_thread, share, usable_threads
from fiberdp._validate import choice, count, interval

# Written into every saved run: a number never changes its meaning.
STREAMS: dict[str, int] = {"data": 1, "noise": 2, "model": 3, "audit": 4, "receipt": 5, "augmentation": 6}

_S = 512  # pairs in a segment; changing it changes every seeded run
_CHUNK = 128  # segments worked on at a time: enough to hide the cost of a call, 1.3 MiB of scratch
_ZEROS = bytes(1 << 16)  # plaintext of the counter mode, small enough to stay in the nearest cache
_MAX_STEP, _MAX_STOP = 2**48, 2**62


@dataclass(frozen=True)
class Keys:
    """The 32 bytes that decide every random number of a run.

    kind: "secret" (from the operating system) or "seeded" (from an integer that others may know).
    The repr leaves the bytes out.

    >>> Keys.seeded(0)
    Keys(kind='seeded')
    >>> Keys.from_json(Keys.seeded(0).to_json()) == Keys.seeded(0) != Keys.seeded(1)
    True
    """

    key: bytes = field(repr=False)
    kind: str

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != 32:
            raise ValueError("key: must be 32 bytes, the key length of AES-256. Use Keys.secret().")
        choice("kind", self.kind, ("secret", "seeded"))

    @classmethod
    def secret(cls) -> Keys:
        """Fresh keys from the operating system: the only ones under which a run is private."""
        return cls(os.urandom(32), "secret")

    @classmethod
    def seeded(cls, seed: int) -> Keys:
        """Reproducible keys, SHA-256 of a label and `seed`; who knows the seed can subtract the noise."""
        count("seed", seed, low=0, why="A seed is a whole number, so that it can be written in a record.")
        return cls(hashlib.sha256(b"fiberdp seeded keys 1:%d" % seed).digest(), "seeded")

    def to_json(self) -> dict[str, str]:
        """The keys themselves, in hex: for the secret resume folder and nowhere else."""
        return {"kind": self.kind, "key": self.key.hex()}

    @classmethod
    def from_json(cls, d: dict[str, str]) -> Keys:
        """Undo `to_json`.  Raises ValueError, without quoting the key, if `d` is anything else."""
        try:
            key, kind = bytes.fromhex(d["key"]), d["kind"]
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                "keys: must hold 'kind' and 'key', 64 hex digits. Anything else is no AES-256 key. Use what Keys.to_json wrote."
            ) from None
        return cls(key, kind)

    def stream(self, name: str) -> Stream:
        """The stream of that name; ValueError listing the names (`STREAMS`) if there is none."""
        return Stream(self.key, choice("stream", name, tuple(STREAMS)))


@dataclass(frozen=True)
class Stream:
    """One named sequence of random vectors, one vector a step.

    step: 0 <= step < 2**48.  start, stop: positions, 0 <= start <= stop <= 2**62; ValueError otherwise.  An
    empty slice is an empty tensor.  Threads may share a stream and a forked child draws the same numbers as
    its parent: scratch memory belongs to one thread, and there is no other state.

    >>> noise = Keys.seeded(0).stream("noise")
    >>> whole = noise.normal(7, 0, 5000)
    >>> torch.equal(whole[1000:3000], noise.normal(7, 1000, 3000))
    True
    >>> torch.equal(whole, noise.add_normal_(torch.zeros(5000), step=7, scale=1.0))
    True
    """

    key: bytes = field(repr=False)
    name: str

    def bits(self, step: int, start: int, stop: int) -> Tensor:
        """Words [start, stop) of this step: int64, all 64 bits random."""
        _check(step, start, stop)
        first = start // 2
        blocks = (stop + 1) // 2 - first
        buffer = bytearray(16 * blocks + 16)
        words = torch.frombuffer(buffer, dtype=torch.int64)
        self._fill(buffer, words, step, first, blocks)
        return words[start % 2 : start % 2 + stop - start]

    def uniform(self, step: int, start: int, stop: int) -> Tensor:
        """Uniform on the multiples of 2**-53 in [0, 1): float64, element i from the top 53 bits of word i."""
        words = self.bits(step, start, stop)
        with one_thread():
            return words.bitwise_right_shift_(11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)

    def normal(self, step: int, start: int, stop: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent N(0, 1) of elements [start, stop): computed in float64, rounded once to `dtype`."""
        _check(step, start, stop)
        _check_dtype(dtype)
        out = torch.empty(stop - start, dtype=dtype, device="cpu")
        self._normals(step, start, 1.0, out, add=False)
        return out

    def add_normal_(self, out: Tensor, *, step: int, scale: float, start: int = 0) -> Tensor:
        """out += scale * z[start : start + len(out)], and return out.

        out: [n], contiguous, float32 or float64, on any device (z is made on the CPU, the same for all).
        scale: std of what is added, in the units of `out`, finite and >= 0; 0 leaves `out` alone.
        scale * z is computed in float64 and rounded once to the dtype of `out`.  No temporary of size n.
        """
        if out.dim() != 1 or not out.is_contiguous():
            raise ValueError(
                f"out: shape {tuple(out.shape)}, strides {out.stride()}: must be one contiguous axis. "
                "Positions in the stream are positions in memory. Flatten it first."
            )
        _check_dtype(out.dtype)
        _check(step, start, start + len(out))
        interval("scale", scale, 0, math.inf, open_high=True, why="It is the std of the noise.")
        if scale == 0:
            return out
        if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("out: requires grad and is a leaf, so it cannot change in place. Pass out.detach().")
        self._normals(step, start, scale, out, add=True)
        increment_version(out)  # autograd does not see what the compiled function writes
        return out

    def seed(self, step: int) -> int:
        """A seed in [0, 2**63) for torch's own generators (dropout), from word 0 of this step."""
        return int(self.bits(step, 0, 1)) & (2**63 - 1)

    def _normals(self, step: int, start: int, scale: float, out: Tensor, *, add: bool) -> None:
        """out = scale * z[start:], or out += it with `add`; scale * z is rounded once to the dtype of `out`.

        Segments are computed whole, whatever part of them is asked for, so that an element always stands at
        the same place of a vector register and a last bit cannot depend on the slice.
        """
        stop, size = start + len(out), 2 * _S
        whole = range(-(-start // size), stop // size)
        noise = _compiled_noise(out.dtype) if out.device.type == "cpu" else None

        def chunk(segment: int, count: int) -> None:
            """The part of segments [segment, segment + count) that is asked for."""
            base = segment * size
            low, high = max(start, base), min(stop, base + size * count)
            part = out[low - start : high - start]
            with _scratch(count) as lent:
                self._fill(lent.buffer, lent.words, step, segment * _S, _S * count)
                z = lent.normals(count, scale, out.dtype)[low - base : high - base].to(out.device)
                if add:  # before the scratch, which z is a part of, is lent again
                    part.add_(z)
                else:
                    part.copy_(z)

        if noise is None:
            first, last = start // size, -(-stop // size)
            share(lambda segment: chunk(segment, min(_CHUNK, last - segment)), range(first, last, _CHUNK))
            return
        if whole:
            at = out[whole.start * size - start :].data_ptr()
            noise(self.key, self._high(step), whole.start, len(whole), scale, add, at, usable_threads())
        for segment in {bound // size for bound in (start, stop) if bound % size}:
            chunk(segment, 1)

    def _high(self, step: int) -> int:
        """The first half of every counter block of a step."""
        return STREAMS[self.name] << 48 | step

    def _fill(self, buffer: bytearray, words: Tensor, step: int, first: int, blocks: int) -> None:
        """Blocks [first, first + blocks) of this step into `buffer`, 16 bytes longer, whose memory `words` shares."""
        compiled = _compiled_keystream()
        if compiled:
            compiled(self.key, self._high(step), first, blocks, words.data_ptr())
        else:
            _encrypt(self.key, self._high(step), first, memoryview(buffer)[: 16 * blocks + 16])


def _encrypt(key: bytes, high: int, first: int, out: memoryview) -> None:
    """The keystream from counter block (high, first) on, as many whole blocks as leave room in `out` for one more."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(high.to_bytes(8, "big") + first.to_bytes(8, "big"))).encryptor()
    for at in range(0, len(out) - 16, len(_ZEROS)):
        zeros = _ZEROS[: len(out) - 16 - at]
        # update_into wants room for one block beyond what it writes
        encryptor.update_into(zeros, out[at : at + len(zeros) + 16])


def _box_muller(words: Tensor, scale: float, radius: Tensor, cos: Tensor, sin: Tensor) -> None:
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
def _compiled_noise(dtype: torch.dtype) -> Callable[..., None] | None:
    """(key, high, first segment, segments, scale, add, address, threads): words and normals in one go, to or onto what is there."""
    name = {torch.float32: "noise_float", torch.float64: "noise_double"}[dtype]
    function = _function(name, *[_BYTES, _SIZE, _SIZE, _SIZE, ctypes.c_double, ctypes.c_int, _ADDRESS, ctypes.c_int])
    return function if _compiled_keystream() else None


@cache
def _compiled_normals(dtype: torch.dtype) -> Callable[[int, int, float, int], None] | None:
    """The same as `_box_muller`, from the addresses of words and normals, in the order of the stream."""
    return _function("normals_float" if dtype == torch.float32 else "normals_double", _ADDRESS, _SIZE, ctypes.c_double, _ADDRESS)


@cache
def _compiled_keystream() -> Callable[[bytes, int, int, int, int], None] | None:
    """`_encrypt` by the processor's AES instructions; None where there are none.

    Raises RuntimeError if it disagrees with the library: then the compiler or the processor is broken, and no noise may come of it.
    """
    function = _function("keystream", _BYTES, _SIZE, _SIZE, _SIZE, _ADDRESS)
    if function is None:
        return None
    key, high, first, expected = bytes(range(32)), 0x0123456789ABCDEF, 2**32 - 20, bytearray(16 * 41)
    found = bytearray(16 * 40)
    _encrypt(key, high, first, memoryview(expected))
    function(key, high, first, 40, ctypes.addressof(ctypes.c_char.from_buffer(found)))
    if found != expected[: len(found)]:
        raise RuntimeError(
            "AES: the compiled cipher and the cryptography library must agree, because one of them is wrong and the noise is made of it. "
            "Remove ~/.cache/fiberdp, and distrust this machine if that does not help."
        )
    return function


_BYTES, _SIZE, _ADDRESS = ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p


def _function(name: str, *argtypes: Any) -> Any:
    return _native.function("_random", name, argtypes)


class _Scratch:
    """Work memory of one thread at a time, kept between calls: fresh pages would cost as much as the arithmetic."""

    def __init__(self, segments: int) -> None:
        self.segments = segments
        self.buffer = bytearray(16 * _S * segments + 16)
        # tensors born in inference mode could not be written to outside it
        with torch.inference_mode(False):
            self.words = torch.frombuffer(self.buffer, dtype=torch.int64)[: 2 * _S * segments].view(segments, 2, _S)
            self.pairs = torch.empty(3, segments, _S, dtype=torch.float64, device="cpu")
            # once the words are used up, their memory takes the normals
            self.ordered = {dtype: self.words.view(dtype).view(-1)[: 2 * _S * segments] for dtype in (torch.float32, torch.float64)}
            self.apart = {dtype: self.pairs.view(-1).view(dtype)[: 2 * _S * segments] for dtype in (torch.float32, torch.float64)}

    def normals(self, segments: int, scale: float, dtype: torch.dtype) -> Tensor:
        """The normals of the words in `buffer`, in the order of the stream."""
        compiled = _compiled_normals(dtype)
        if compiled is not None:
            z = self.apart[dtype][: 2 * _S * segments]
            compiled(self.words.data_ptr(), segments, scale, z.data_ptr())
            return z
        radius, cos, sin = self.pairs[:, :segments]
        _box_muller(self.words[:segments], scale, radius, cos, sin)
        z = self.ordered[dtype][: 2 * _S * segments]
        z.view(segments, 2, _S)[:, 0].copy_(cos)
        z.view(segments, 2, _S)[:, 1].copy_(sin)
        return z


_idle: list[_Scratch] = []  # as many as there ever were threads at once


@contextmanager
def _scratch(segments: int) -> Iterator[_Scratch]:
    """Lend one that is big enough."""
    try:
        lent = _idle.pop()
    except IndexError:
        lent = _Scratch(segments)
    if lent.segments < segments:
        lent = _Scratch(segments)
    try:
        yield lent
    finally:
        _idle.append(lent)


def _check(step: int, start: int, stop: int) -> None:
    count("step", step, low=0, why="A step is one vector of the stream.")
    count("start", start, low=0, why="Positions in a step count from 0.")
    count("stop", stop, low=start, why="A slice [start, stop) may not end before it starts.")
    if step >= _MAX_STEP or stop > _MAX_STOP:
        raise ValueError(
            f"step={step}, stop={stop}: must be below 2**48 and at most 2**62. Beyond, the counter would run "
            "into that of another vector. Use another key."
        )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"dtype={dtype}: must be torch.float32 or torch.float64. A shorter one rounds the noise to a "
            "grid that the privacy proof does not know. Draw float32 and convert what is released."
        )
