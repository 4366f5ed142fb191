"""Any stable linear filter, by its matrices (Corollary 4.4).

z_t = M z_{t-1} + G g_t,        g~_t = H z_t + D g_t,        z_{-1} = 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fiberdp.filters.filter import Filter, State
from fiberdp.linear import StateSpace, refuse_unstable

Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LTI(Filter):
    """M: [n, n], G: [n], H: [n] as (nested) sequences of numbers; D: a number.

    The output uses the state after this step's input, as the paper writes it; for scipy.signal's convention see `from_scipy`.

    Raises ValueError if shapes do not agree or the spectral radius of M is 1 or more.
    """

    name: ClassVar[str] = "lti"
    M: tuple[Row, ...]
    G: Row
    H: Row
    D: float = 0.0

    def __post_init__(self) -> None:
        try:
            M, G, H = (np.array(x, dtype=float) for x in (self.M, self.G, self.H))
            D = float(self.D)
        except (TypeError, ValueError):
            raise ValueError(
                "lti: M, G, H and D must be (nested) sequences of numbers, a linear system's matrices. Give M=[[0.5]], G=[1], H=[1]."
            ) from None
        n = len(G) if G.ndim == 1 else -1
        if n < 1 or M.shape != (n, n) or H.shape != (n,):
            raise ValueError(
                f"lti: M has shape {M.shape}, G {G.shape}, H {H.shape}: they must be (n, n), (n,) and (n,), because one number goes in and "
                "one comes out. Give matrices that agree."
            )
        if not all(np.isfinite(x).all() for x in (M, G, H, np.array(D))):
            raise ValueError("lti: M, G, H and D must be finite numbers, because they multiply gradients. Remove what is not.")
        refuse_unstable("lti", StateSpace(M, G, H).spectral_radius)
        for key, value in (("M", tuple(map(tuple, M.tolist()))), ("G", tuple(G.tolist())), ("H", tuple(H.tolist())), ("D", D)):
            object.__setattr__(self, key, value)  # JSON gives lists

    @classmethod
    def from_scipy(cls, A: object, B: object, C: object, D: object) -> LTI:
        """The filter y_t = C x_t + D u_t, x_{t+1} = A x_t + B u_t of scipy.signal.dlti: one state more holds x_t before the update."""
        A, B, C, D = (np.array(x, dtype=float) for x in (A, B, C, D))
        n = len(A)
        M = np.block([[A, np.zeros((n, n))], [np.eye(n), np.zeros((n, n))]])  # state (x_{t+1}, x_t)
        G = np.concatenate([B.reshape(n), np.zeros(n)])
        return cls(M=tuple(map(tuple, M)), G=tuple(G), H=tuple(np.concatenate([np.zeros(n), C.reshape(n)])), D=float(D.reshape(())))

    def names(self) -> tuple[str, ...]:
        return tuple(f"z_{i}" for i in range(1, len(self.G) + 1))

    @staticmethod
    def recursion(g: Tensor, state: State, M: tuple[Row, ...], G: Row, H: Row, D: float) -> tuple[Tensor, State]:
        z, new, g_tilde = list(state.values()), {}, D * g
        for name, row, gain, h in zip(state, M, G, H):
            new[name] = gain * g
            for m, z_j in zip(row, z):
                if m != 0:
                    new[name] = new[name] + m * z_j
            g_tilde = g_tilde + h * new[name]
        return g_tilde, new

    def gains(self, t: int | None) -> tuple[tuple[Row, ...], Row, Row, float]:
        return self.M, self.G, self.H, self.D

    def system(self, t: int | None) -> StateSpace:
        """With D, the newest input is one state more."""
        M, G, H = (np.array(x) for x in (self.M, self.G, self.H))
        if self.D == 0:
            return StateSpace(M, G, H)
        return StateSpace(np.pad(M, ((0, 1), (0, 1))), np.append(G, 1.0), np.append(H, self.D))
