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

    def noise_gain(self, impulse_response: tuple[float, ...] = (1.0,)) -> float:
        """A = Var[g~] / std^2 at stationarity, for noise with the given impulse response (1.0 = white).

        H Sigma H' with Sigma = M Sigma M' + G G' (eq. 17), the noising filter's taps being part of the state.
        """
        M, G, H = self._with_noising(impulse_response, 1.0)
        return float(H @ solve_discrete_lyapunov(M, np.outer(G, G)) @ H)

    def dc_gain(self) -> float:
        """Sum_j h_j = H (I - M)^{-1} G: what a constant gradient is multiplied by in the long run."""
        return float(self.H @ np.linalg.solve(np.eye(len(self.G)) - self.M, self.G))

    def _with_noising(self, k: tuple[float, ...], std: float) -> tuple[Array, Array, Array]:
        """The system driven by unit white noise through w_t = std Sum_j k_j z_{t-j}; the extra states are z_{t-1}, z_{t-2}, …"""
        n, taps = len(self.G), len(k) - 1
        M = np.zeros((n + taps, n + taps))
        M[:n, :n] = self.M
        M[:n, n:] = std * np.outer(self.G, k[1:])
        if taps:
            M[n + 1 :, n:-1] = np.eye(taps - 1)
        G = np.concatenate([std * k[0] * self.G, np.eye(1, taps)[0] if taps else np.empty(0)])
        return M, G, np.concatenate([self.H, np.zeros(taps)])


class NoiseVariance:
    """Var of one coordinate of the filtered noise at t = 0, 1, 2, …, exactly, from the filter and each release's noise.

        Sigma_t = M Sigma_{t-1} M' + G G' std_t^2,      Var[n_t] = H Sigma_t H'

    (with the noising filter's taps in the state when the noise is coloured).  `covariance` is the whole state.
    """

    def __init__(self, covariance: Array | None = None) -> None:
        self.covariance = covariance

    def update(self, system: StateSpace, noise: Noise) -> float:
        """Advance one step with this step's system and noise; return Var[n_t] in gradient units squared."""
        M, G, H = system._with_noising(noise.impulse_response, noise.std)
        previous = np.zeros_like(M) if self.covariance is None else self.covariance
        self.covariance = M @ previous @ M.T + np.outer(G, G)
        return float(H @ self.covariance @ H)
