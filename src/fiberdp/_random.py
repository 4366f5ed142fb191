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

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fiberdp import _normals
from fiberdp._normals import S, Scratch
from fiberdp._threads import one_thread, share, usable_threads
from fiberdp._validate import choice, count, interval

# Written into every saved run: a number never changes its meaning.
STREAMS: dict[str, int] = {"data": 1, "noise": 2, "model": 3, "audit": 4, "receipt": 5, "augmentation": 6}

_CHUNK = 128  # segments worked on at a time: enough to hide the cost of a call, 1.3 MiB of scratch
_MAX_STEP, _MAX_STOP = 2**48, 2**62
_TAIL = 2**15  # added to the number of a stream: the stream of its later bits


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
        _normals.fill(self.key, self._high(step), first, blocks, buffer, words)
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
        _check_target(out, step, start, scale)
        if scale > 0:
            self._normals(step, start, scale, out, add=True)
            increment_version(out)  # autograd does not see what the compiled function writes
        return out

    def add_rounded_normal_(self, out: Tensor, *, step: int, scale: float, grid: float, start: int = 0) -> Tensor:
        """out = grid (round(out / grid) + round(scale z / grid)), rounded to the dtype of `out`; and return out.

        The z are exact: real normals of real uniforms, whose bits are drawn until the rounding is decided.  So the second term is a
        rounded Gaussian without any error, and the sum is the first term plus a real Gaussian, rounded: what a proof about real numbers
        says of that holds.  They are within 2**-44 of the z of `add_normal_`, and the same on every machine, compiled or not.
        grid: a power of two, at least scale / 2**47.  Otherwise as `add_normal_`.
        """
        _check_target(out, step, start, scale)
        interval("grid", grid, 0, math.inf, open_low=True, open_high=True, why="It is the distance of the values that may be released.")
        if math.frexp(grid)[0] != 0.5 or scale > grid * _normals.LARGEST:
            raise ValueError(
                f"grid={grid} with scale={scale}: it must be a power of two of at least scale / 2**47, because only then is a division by "
                "it exact, and the noise a whole number of it. Choose 2.0**k."
            )
        if scale == 0:
            return out

        def place(part: Tensor, n: Tensor, at: int) -> None:
            for i in n.isnan().nonzero().flatten().tolist():
                n[i] = self._rounded(step, at + i, scale / grid)
            part.copy_(part.to("cpu", torch.float64, copy=True).div_(grid).round_().add_(n).mul_(grid))

        first, last = start // (2 * S), -(-(start + len(out)) // (2 * S))
        self._in_chunks(range(first, last), step, start, out, lambda lent, count: lent.rounded(count, scale / grid), place)
        return out

    def seed(self, step: int) -> int:
        """A seed in [0, 2**63) for torch's own generators (dropout), from word 0 of this step."""
        return int(self.bits(step, 0, 1)) & (2**63 - 1)

    def _normals(self, step: int, start: int, scale: float, out: Tensor, *, add: bool) -> None:
        """out = scale * z[start:], or out += it with `add`; scale * z is rounded once to the dtype of `out`.

        Segments are computed whole, whatever part of them is asked for, so that an element always stands at
        the same place of a vector register and a last bit cannot depend on the slice.
        """
        stop, size = start + len(out), 2 * S
        whole = range(-(-start // size), stop // size)
        noise = _normals.compiled_noise(out.dtype) if out.device.type == "cpu" else None

        def place(part: Tensor, z: Tensor, at: int) -> None:
            if add:
                part.add_(z.to(out.device))
            else:
                part.copy_(z)

        def in_chunks(segments: range) -> None:
            self._in_chunks(segments, step, start, out, lambda lent, count: lent.normals(count, scale, out.dtype), place)

        if noise is None:
            in_chunks(range(start // size, -(-stop // size)))
            return
        if whole:
            at = out[whole.start * size - start :].data_ptr()
            noise(self.key, self._high(step), whole.start, len(whole), scale, add, at, usable_threads())
        for segment in {bound // size for bound in (start, stop) if bound % size}:
            in_chunks(range(segment, segment + 1))

    def _in_chunks(
        self, segments: range, step: int, start: int, out: Tensor, numbers: Callable[[Scratch, int], Tensor],
        place: Callable[[Tensor, Tensor, int], None],
    ) -> None:  # fmt: skip
        """place(part of `out`, its numbers, its first position) for all of `segments` that `out` covers, several chunks at once."""
        stop, size = start + len(out), 2 * S

        def chunk(segment: int) -> None:
            count, base = min(_CHUNK, segments.stop - segment), segment * size
            low, high = max(start, base), min(stop, base + size * count)
            with _normals.scratch(count) as lent:
                _normals.fill(self.key, self._high(step), segment * S, S * count, lent.buffer, lent.words)
                place(out[low - start : high - start], numbers(lent, count)[low - base : high - base], low)

        share(chunk, segments[::_CHUNK])

    def _rounded(self, step: int, position: int, scale: float) -> int:
        """round(scale z) of one position, from as many bits as it takes: those beyond its words stand at counters of their own."""
        segment, at = divmod(position, 2 * S)
        a, b = (int(self.bits(step, word, word + 1)) for word in (segment * 2 * S + at % S, segment * 2 * S + S + at % S))

        def more(level: int) -> tuple[int, int]:
            block = bytearray(32)
            _normals.encrypt(self.key, _TAIL << 48 | self._high(step), (segment * S + at % S) * _normals.LEVELS + level, memoryview(block))
            return int.from_bytes(block[:8], "little"), int.from_bytes(block[8:16], "little")

        return _normals.decided(scale, a, b, at >= S, more)

    def _high(self, step: int) -> int:
        """The first half of every counter block of a step."""
        return STREAMS[self.name] << 48 | step


def _check_target(out: Tensor, step: int, start: int, scale: float) -> None:
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"out: shape {tuple(out.shape)}, strides {out.stride()}: must be one contiguous axis. "
            "Positions in the stream are positions in memory. Flatten it first."
        )
    _check_dtype(out.dtype)
    _check(step, start, start + len(out))
    interval("scale", scale, 0, math.inf, open_high=True, why="It is the std of the noise.")
    if scale > 0 and out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("out: requires grad and is a leaf, so it cannot change in place. Pass out.detach().")


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
