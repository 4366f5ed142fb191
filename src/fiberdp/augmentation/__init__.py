"""Augmentations: copies of one example, whose gradients are averaged before the clip.  They see a batch and uniform draws."""

from fiberdp.augmentation.crop_flip import CropFlip
from fiberdp.augmentation.none import NoAugmentation

AUGMENTATIONS = {cls.name: cls for cls in (NoAugmentation, CropFlip)}

__all__ = ["AUGMENTATIONS", "CropFlip", "NoAugmentation"]
