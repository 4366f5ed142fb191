"""Augmentation multiplicity: K random crops and mirror images of ONE example (De et al., 2022, arXiv:2204.13650).

    u_t(xi) = (1/K) Sum_k grad f(theta; a_k(xi)),       a_k = crop of the padded image, mirrored with probability 1/2

The K gradients are averaged before the clip, so one example stays one unit of sensitivity, and K costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fiberdp import _tree, _validate


@dataclass(frozen=True, kw_only=True)
class CropFlip:
    """multiplicity: K, copies an example.  padding: pixels by which a crop may be off centre.  flip: mirror left and right, or not.

    The padding reflects the image at its border pixels (the border itself is not repeated), so no made-up value enters.
    Every tensor [b, C, H, W] of uint8 or floating numbers is an image; an example's images share their draws, so that a mask
    moves with its picture.  Everything else (labels) is repeated.

    Guarantee: copy k of the example at position i depends on that example and on draws i, k alone.  The draws know no data and
    are independent and alike in every position, so who is in a batch decides nothing about the others' copies.

    >>> image = torch.arange(9.0).view(1, 1, 3, 3)
    >>> CropFlip(multiplicity=1, padding=1).apply(image, torch.tensor([[[0.5, 0.9, 0.9]]]))  # centre row, one pixel to the right
    tensor([[[[1., 2., 1.],
              [4., 5., 4.],
              [7., 8., 7.]]]])
    """

    name: ClassVar[str] = "crop_flip"
    draws: ClassVar[int] = 3
    multiplicity: int = 16
    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        _validate.count("multiplicity", self.multiplicity, why="It is how many copies of an example are averaged before the clip.")
        _validate.count("padding", self.padding, low=0, why="It is how many pixels a crop may be off centre.")
        if not isinstance(self.flip, bool):
            raise ValueError(f"flip={self.flip!r}: must be True or False. Use False where left and right mean something, as in digits.")

    def apply(self, batch: Any, uniforms: Tensor) -> Any:
        """The batch with K copies an example: every leaf [b, …] becomes [b, K, …], or stays [b, …] if K = 1.

        uniforms: [b, K, 3] in [0, 1): row, column and mirror of each copy.  An empty batch stays empty.
        Raises ValueError if no leaf is an image, or one is too small for the padding.
        """
        leaves = _tree.leaves(batch)
        if not any(_is_image(leaf) for leaf in leaves):
            shapes = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor)) or "no tensor"
            raise ValueError(
                f"augmentation crop_flip on a batch of {shapes}: one tensor [b, C, H, W] of uint8 or floating numbers is needed, because "
                "images are what it crops. Use augmentation none."
            )
        copied = _tree.map_leaves(lambda leaf: self._crops(leaf, uniforms) if _is_image(leaf) else _repeat(leaf, self.multiplicity), batch)
        return copied if self.multiplicity > 1 else _tree.map_leaves(_only, copied)

    def _crops(self, image: Tensor, uniforms: Tensor) -> Tensor:
        """[b, C, H, W] -> [b, K, C, H, W], as one gather: rows and columns are looked up, nothing is padded in memory."""
        height, width = image.shape[2:]
        if min(height, width) <= self.padding:
            raise ValueError(
                f"padding={self.padding} with images of {height}x{width}: must be smaller than both sides, because it reflects the image. "
                "Use a smaller padding."
            )
        shift = (uniforms[..., :2] * (2 * self.padding + 1)).long() - self.padding
        rows, columns = (_reflect(shift[..., axis, None] + torch.arange(side), side) for axis, side in enumerate((height, width)))
        if self.flip:
            columns = torch.where(uniforms[..., 2:] < 0.5, columns.flip(-1), columns)
        rows, columns = rows.to(image.device)[:, :, None, :, None], columns.to(image.device)[:, :, None, None, :]
        example = torch.arange(len(image), device=image.device)[:, None, None, None, None]
        channel = torch.arange(image.shape[1], device=image.device)[:, None, None]
        return image[example, channel, rows, columns]


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 4 and (leaf.dtype == torch.uint8 or leaf.is_floating_point())


def _reflect(index: Tensor, side: int) -> Tensor:
    """Positions outside [0, side) mirrored at the outermost pixels: -1 -> 1, side -> side - 2."""
    last = side - 1
    return last - (last - index.abs()).abs()


def _repeat(leaf: Any, copies: int) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[:, None].expand(len(leaf), copies, *leaf.shape[1:])
    return [[value] * copies for value in leaf]


def _only(leaf: Any) -> Any:
    return leaf[:, 0] if isinstance(leaf, Tensor) else [value for (value,) in leaf]
