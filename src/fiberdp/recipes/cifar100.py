"""CIFAR-100 from scratch with WRN-16-4, GroupNorm in the place of BatchNorm (paper, Table 16)."""

from __future__ import annotations

from fiberdp.recipes.cifar10 import GRIDS
from fiberdp.recipes.recipe import Published, Recipe, blank_image, published, with_held_out


def cifar100_wrn() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import CIFAR100, load_images
    from fiberdp.recipes.models import wide_resnet_classifier

    return Recipe(
        name="cifar100-wrn",
        task="photos 32x32, 100 classes",
        model="WRN-16-4, 2,772,020",
        data="uoft-cs/cifar100",
        paper="Table 16",
        cpu_minutes=1600,  # extrapolated from the benchmark's 76 images/s of two points
        epsilon=1.0,
        clip_norm=1.0,
        batch_size=5000,
        epochs=80,
        num_examples=45_000,
        published=(
            *(
                Published("fiber", epsilon, value, "Table 16", std)
                for epsilon, value, std in ((0.5, 30.28, 0.56), (1, 36.33, 0.61), (2, 41.83, 0.46), (4, 46.18, 0.56), (8, 47.46, 0.82))
            ),
            *published("Table 18", (0.5, 1, 2, 4, 8), {"disk": (14.7, 22.7, 30.0, 37.1, 42.0)}),
        ),
        grids=GRIDS,
        options={},  # not tuned here: each method's own default learning rate
        load=lambda data_dir: with_held_out(load_images(CIFAR100, data_dir), 5000, sampled=True),
        build=wide_resnet_classifier,
        augmentation=CropFlip(padding=4, flip=True),
        row=lambda: blank_image(3, 32, 32),
    )
