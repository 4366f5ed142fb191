"""CIFAR-10 with CNN5, the five-layer GroupNorm/tanh CNN of the paper's vision tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fiberdp.recipes.recipe import Published, Recipe, blank_image, by_logits, published, with_held_out

if TYPE_CHECKING:
    from torch import Tensor, nn

GRIDS: dict[str, tuple[float, ...]] = {  # Table 9, CIFAR
    "epochs": (40, 80, 120, 160), "batch_size": (500, 1000, 2000, 5000), "lr": (0.005, 0.001, 0.0005, 0.0001),
    "omega": (0.6, 0.7, 0.8, 0.9, 0.99), "kappa": (0.5, 0.6, 0.7, 0.8, 0.9), "gamma": (0.6, 0.7, 0.8, 0.9),
}  # fmt: skip


def cifar10_features() -> Recipe:
    """The stand-in of `cifar100-vit-small-ft` for a machine of two cores: a private head on frozen features of public pretraining."""
    from fiberdp.recipes.data import CIFAR10
    from fiberdp.recipes.features import WIDTH, cached_features

    def load(data_dir: str | None) -> dict[str, Any]:
        return with_held_out(cached_features(CIFAR10, data_dir, size=160), 5000)

    def build() -> nn.Module:
        from torch import nn

        head = nn.Linear(WIDTH, 10)
        nn.init.zeros_(head.weight)  # a convex problem: no symmetry to break, and no start to be lucky with
        nn.init.zeros_(head.bias)
        return head

    def blank() -> dict[str, Tensor]:
        import torch

        return {"features": torch.zeros(1, WIDTH), "label": torch.zeros(1, dtype=torch.int64)}

    return Recipe(
        name="cifar10-features",
        task="photos 32x32",
        model="head on EfficientNet-Lite0, 12,810",
        data="uoft-cs/cifar10",
        paper="Table 1, as a stand-in",
        cpu_minutes=0.2,
        epsilon=1.0,
        clip_norm=1.0,
        batch_size=5000,
        epochs=20,
        num_examples=45_000,
        # where sweeps begin; their results are in results/cifar10-features
        options={
            **{name: {"lr": 0.004} for name in ("dp-adamw", "dp-adambc", "disk", "disk-corr", "fiber", "fiber-nocorr", "fiber-bccorr")},
            **{name: {"lr": 0.004} for name in ("fiber-tied", "fiber-lookahead", "fiber-plus")},
            "doppler": {"lr": 0.004, "b": (0.1,), "a": (1.0, -0.9)},  # the second-order default swings
            **{name: {"lr": 1.0} for name in ("dp-sgd", "mf-dp-ftrl")},
        },
        load=load,
        build=build,
        **by_logits(lambda model, batch: model(batch["features"])),
        row=blank,
    )


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
        num_examples=45_000,
        published=(
            *(
                Published("fiber", epsilon, value, "Table 14", std)
                for epsilon, value, std in ((0.5, 66.72, 0.08), (1, 70.71, 0.10), (2, 73.95, 0.18), (4, 75.82, 0.27), (8, 80.25, 0.19))
            ),
            *published("Table 12", (0.5, 1, 8), {"dp-adamw": (42.92, 48.57, 64.30), "disk": (61.62, 64.85, 69.50)}),
        ),
        grids=GRIDS,
        options={},  # not tuned here yet: each method's own default learning rate
        load=lambda data_dir: with_held_out(load_images(CIFAR10, data_dir), 5000),
        build=cnn5,
        augmentation=CropFlip(padding=4, flip=True),
        row=lambda: blank_image(3, 32, 32),
    )
