"""Per-example gradients by vectorising autograd over the examples (torch.func), in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap

from fiberdp import _tree
from fiberdp.engines.loss import Loss, random_state, saved_bytes
from fiberdp.engines.points import points
from fiberdp.engines.sums import Clip, Tap, clipped_total, fitting_micro_batch
from fiberdp.flat import FlatParameters
from fiberdp.types import ClippedSum, Probe


class PerExampleText:
    """Stands where a batch had a list: a vectorised loss sees all examples at once and cannot be handed one example's text."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            "loss_fn reads a field that is not a tensor: the vmap engine needs tensors, because it runs all examples of a micro-batch "
            "as one. Tokenise in the data set, or use engine='loop'."
        )

    __getitem__ = __iter__ = __len__ = _refuse


class VmapEngine:
    """Sum_i clip(Sum_k w_k grad f(theta_k; xi_i)), all examples of a micro-batch at once."""

    name: ClassVar[str] = "vmap"

    def __init__(self, flat: FlatParameters, loss: Loss, *, memory_budget: int = 2**30) -> None:
        self.flat = flat
        self.loss = loss
        self.memory_budget = memory_budget
        self._gradient = vmap(grad(self._one, has_aux=True), in_dims=(None, 0, None, None), randomness="different")

    def micro_batch_size(self, row: Any, num_probes: int, batch_size: int) -> int:
        """How many examples fit the memory budget: per example, gradients of d floats (two points and one product), and activations.

        A power of two, at most 256 rows of copies (or one example).  `row` is a batch of one example, read for its structure only.
        """
        device = self.flat.theta.device
        with random_state(0, device), torch.enable_grad(), saved_bytes(self.flat) as saved:
            copies = _tree.to(_tree.zeros(row, self.loss.multiplicity), device)
            self.loss.of_one(self.flat.views(self.flat.theta.detach().requires_grad_()), copies)
        gradients = self.flat.numel * self.flat.theta.element_size() * (1 + min(num_probes, 2))
        fitting = fitting_micro_batch(gradients + 3 * saved[0], self.memory_budget, self.loss.multiplicity)
        return 1 << (fitting.bit_length() - 1)

    def clipped_sum(
        self, probes: Sequence[Probe], d: Tensor | None, batch: Any, clip: Clip, *,
        seed: int, loss_scale: float = 1.0, scale: Tensor | None = None, tap: Tap | None = None, out: Tensor | None = None,
    ) -> ClippedSum:  # fmt: skip
        """The clipped sum over one micro-batch.

            u_i = scale * Sum_k w_k grad f(theta + lookahead_k d; xi_i);     total = Sum_i factor(||u_i||) u_i

        probes, d: where to evaluate (d None: at theta only).  batch: one row per example, possibly none.  seed: random state of
        dropout and the like, the same at every point.  loss_scale: multiplies every loss (0 in the noise receipt).
        scale: Tensor[d], factors from releases alone, or None.
        tap: receives raw losses and norms, unaccounted.  out: Tensor[d] to which the sum is added instead of to zeros; it is the total.

        Guarantee: adding or removing one example moves the total by at most clip.sensitivity, whatever the example.
        With K copies an example, f is the mean over them: they are one example to the clip.
        An empty batch gives zeros; an example with NaN or infinite gradient contributes 0.
        Raises ValueError if the loss is not one per example or cannot be vectorised.
        """
        total = torch.zeros_like(self.flat.theta) if out is None else out
        if _tree.rows(batch) == 0:
            return ClippedSum(total, clip.sensitivity)
        u, losses = self._observation(points(self.flat.theta.detach(), d, probes), batch, seed, loss_scale)
        if scale is not None:
            for name, factor in self.flat.views(scale).items():
                u[name] = u[name] * factor
        norms = clipped_total(((slot, u[slot.name]) for slot in self.flat.slots), clip, total)
        if tap is not None:
            tap(losses, norms)
        return ClippedSum(total, clip.sensitivity)

    def _observation(self, where: list[tuple[float, Tensor]], batch: Any, seed: int, scale: float) -> tuple[dict[str, Tensor], Tensor]:
        """u per parameter, [b, *shape], and the raw losses at the first point."""
        tensors = tuple(leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor))
        u: dict[str, Tensor] = {}
        losses, up = None, self.loss.gradient_scale
        for weight, point in ((weight / up, point) for weight, point in where):
            with random_state(seed, point.device):  # the same dropout masks at every point
                try:
                    gradients, value = self._gradient(self.flat.views(point), tensors, batch, up * scale)
                except RuntimeError as error:
                    if self.loss.precision != "float32":
                        raise ValueError(
                            f"engine vmap cannot vectorise this model in {self.loss.precision} ({str(error).splitlines()[0][:160]}): some "
                            "layers (LayerNorm) are not vectorised in mixed precision. Use engine='ghost', or precision='float32'."
                        ) from error
                    raise ValueError(
                        f"engine vmap cannot vectorise this model or loss ({str(error).splitlines()[0][:160]}): it must be free of "
                        "in-place writes to shared buffers and of Python branches on values. Rewrite that line, or use engine='loop'."
                    ) from error
            losses = value if losses is None else losses
            if not u:  # out of place if anything follows: gradients may be views of one another (x + p, cat), or of one zero
                u = gradients if len(where) == 1 and weight == 1 else {name: g * weight for name, g in gradients.items()}
            else:
                for name, g in gradients.items():
                    u[name].add_(g, alpha=weight)
        assert losses is not None
        return u, losses

    def _one(self, parameters: dict[str, Tensor], tensors: tuple[Tensor, ...], batch: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Loss of one example as a batch of its copies.  `batch` gives the structure only; `tensors` are this example's."""
        own = iter(tensors if self.loss.multiplicity > 1 else [tensor.unsqueeze(0) for tensor in tensors])
        example = _tree.map_leaves(lambda leaf: next(own) if isinstance(leaf, Tensor) else PerExampleText(), batch)
        loss = self.loss.of_one(parameters, example)
        return loss * scale, loss.detach()
