"""CIFAR-10 with CNN5, the five-layer GroupNorm/tanh CNN of the paper's vision tables."""

from __future__ import annotations

from fiberdp.recipes.recipe import Recipe, blank_image, classification_loss, with_held_out


def cifar10_cnn5() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import CIFAR10, load_images
    from fiberdp.recipes.models import cnn5

    return Recipe(
        name="cifar10-cnn5",
        task="photos 32x32",
        model="CNN5, 619,876",
        data="uoft-cs/cifar10",
        paper="Table 14",
        cpu_minutes=280,  # extrapolated from 3 steps at 218 images/s
        epsilon=1.0,
        clip_norm=1.0,
        batch_size=5000,
        epochs=80,
        options={},  # not tuned here yet: each method's own default learning rate
        load=lambda data_dir: with_held_out(load_images(CIFAR10, data_dir), 5000),
        build=cnn5,
        loss=classification_loss,
        augmentation=CropFlip(padding=4, flip=True),
        row=lambda: blank_image(3, 32, 32),
    )
