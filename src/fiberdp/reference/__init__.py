"""Each algorithm in float64 NumPy beside its pseudocode: what the fast path is compared with.

    | function    | method                                                | where it is written down               |
    |-------------|-------------------------------------------------------|----------------------------------------|
    | fiber       | FiBeR, its corrections and its look-ahead             | FiBeR paper, Algorithm 3               |
    | doppler     | DOPPLER                                               | Zhang et al. 2024b                     |
    | disk        | DiSK and DiSK-Corr                                    | FiBeR paper, eqs. 2-4 and 74           |
    | dp_sgd      | DP-SGD with momentum                                  | FiBeR paper, Algorithm 2               |
    | dp_adamw    | DP-AdamW                                              | FiBeR paper, eqs. 8-10 without filter  |
    | dp_adambc   | DP-AdamBC, with decoupled weight decay                | Tang et al. 2024; eq. 12 with A = 1    |
    | mf_dp_ftrl  | MF-DP-FTRL: DP-SGD on correlated noise                | Choquette-Choo et al. 2023             |

Nothing here is imported by the library or imports it: an oracle that shares code with what it judges sees no error in
that code.  All take

    theta0       [d], float64
    gradient     gradient(theta, i) -> [d]: the gradient of example i's loss at theta
    batches      B_0, B_1, …: one iterable of examples a step, possibly empty; their number is T
    noises       z_0, z_1, …: one standard normal vector [d] a step
    C, sigma, B  clip norm, noise multiplier (std of the noise on the sum over C), expected batch size (a constant)
    lr           lr(t) -> eta_t

and return the trajectory theta_0, …, theta_T as one array [T + 1, d].
"""

from fiberdp.reference.clipping import clip
from fiberdp.reference.disk import disk
from fiberdp.reference.doppler import doppler
from fiberdp.reference.fiber import fiber
from fiberdp.reference.matrix import mf_dp_ftrl
from fiberdp.reference.one_point import dp_adambc, dp_adamw, dp_sgd

__all__ = ["clip", "disk", "doppler", "dp_adambc", "dp_adamw", "dp_sgd", "fiber", "mf_dp_ftrl"]
