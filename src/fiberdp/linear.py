"""Linear filters as what they are: a state-space system, from which every noise figure comes (paper, section 4.3).

    z_t = M z_{t-1} + G g_t,        g~_t = H z_t,        z_{-1} = 0

One description serves the stationary gain (Lyapunov, Corollary 4.4), the impulse response (Proposition 4.3), and the
variance at every finite t (Lemma C.2), for white or coloured noise of constant or changing strength.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from fiberdp.types import Noise

Array = np.ndarray

WHITE = Noise(1.0)


@dataclass(frozen=True)
class StateSpace:
    """M: [n, n], G: [n], H: [n], float64.  One scalar system, applied to every coordinate alike."""

    M: Array
    G: Array
    H: Array

    @property
    def spectral_radius(self) -> float:
        """Largest |eigenvalue| of M; below 1 the filter is stable and memory fades geometrically at this rate."""
        return float(np.abs(np.linalg.eigvals(self.M)).max())

    def impulse_response(self, length: int) -> Array:
        """h_j = H M^j G for j < length: what one unit of input at step 0 gives at step j."""
        h, z = np.empty(length), self.G
        for j in range(length):
            h[j] = self.H @ z
            z = self.M @ z
        return h

    def noise_gain(self, noise: Noise = WHITE) -> float:
        """A = Var[g~] / std^2 at stationarity, for noise through the noising filter of `noise` (its std does not matter).

        H Sigma H' with Sigma = M Sigma M' + G G' (eq. 17), the noising filter being part of the system.
        """
        M, G, H = self._driven_by(Noise(1.0, noise.b, noise.a))
        return float(H @ solve_discrete_lyapunov(M, np.outer(G, G)) @ H)

    def mean_lag(self) -> float:
        """Sum_j j h_j / Sum_j h_j = H (I - M)^{-2} M G / DC gain: by how many steps a slow drift is followed late; 0 is no lag."""
        resolvent = np.linalg.inv(np.eye(len(self.G)) - self.M)
        return float(self.H @ resolvent @ resolvent @ self.M @ self.G) / self.dc_gain()

    def dc_gain(self) -> float:
        """Sum_j h_j = H (I - M)^{-1} G: what a constant gradient is multiplied by in the long run."""
        return float(self.H @ np.linalg.solve(np.eye(len(self.G)) - self.M, self.G))

    def _driven_by(self, noise: Noise) -> tuple[Array, Array, Array]:
        """The system with `noise` as input, driven by unit white z_t: state (filter, z_{t-1}, z_{t-2}, …, x_{t-1}, x_{t-2}, …)."""
        b, a = np.array(noise.b) / noise.a[0], np.array(noise.a) / noise.a[0]
        n, q, p = len(self.G), len(b) - 1, len(a) - 1
        x_t = np.concatenate([np.zeros(n), b[1:], -a[1:]])  # x_t = x_t @ state + b_0 z_t
        M = np.zeros((n + q + p, n + q + p))
        M[:n, :n] = self.M
        M[:n] += noise.std * np.outer(self.G, x_t)
        G = np.concatenate([noise.std * b[0] * self.G, np.zeros(q + p)])
        if q:
            M[n + 1 : n + q, n : n + q - 1] = np.eye(q - 1)
            G[n] = 1.0
        if p:
            M[n + q] = x_t
            M[n + q + 1 :, n + q : -1] = np.eye(p - 1)
            G[n + q] = b[0]
        return M, G, np.concatenate([self.H, np.zeros(q + p)])


def refuse_unstable(what: str, radius: float) -> None:
    """Raise ValueError unless a filter with this spectral radius forgets."""
    if not radius < 1:
        raise ValueError(
            f"{what}: the spectral radius of its recursion is {radius:.6g}, it must be below 1, because an unstable filter lets the noise "
            "grow without bound. Choose other coefficients."
        )


class NoiseVariance:
    """Var of one coordinate of the filtered noise at t = 0, 1, 2, …, exactly, from the filter and each release's noise.

        Sigma_t = M Sigma_{t-1} M' + G G' std_t^2,      Var[n_t] = H Sigma_t H'

    (with the noising filter in the system when the noise is correlated).  `covariance` is the whole state.
    """

    def __init__(self, covariance: Array | None = None) -> None:
        self.covariance = covariance

    def update(self, system: StateSpace, noise: Noise) -> float:
        """Advance one step with this step's system and noise; return Var[n_t] in gradient units squared."""
        M, G, H = system._driven_by(noise)
        previous = np.zeros_like(M) if self.covariance is None else self.covariance
        self.covariance = M @ previous @ M.T + np.outer(G, G)
        return float(H @ self.covariance @ H)
