"""MNIST and Fashion-MNIST with the small tanh CNN of Papernot et al. (2021) and Tramer and Boneh (2021)."""

from __future__ import annotations

from dataclasses import replace

from fiberdp.recipes.recipe import Published, Recipe, blank_image, with_held_out


def mnist_cnn() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import MNIST, load_images
    from fiberdp.recipes.models import tramer_boneh_cnn

    return Recipe(
        name="mnist-cnn",
        task="digits 28x28",
        model="CNN, 26,010",
        data="ylecun/mnist",
        paper="Table 15",
        cpu_minutes=5.5,
        epsilon=1.0,
        clip_norm=1.0,
        batch_size=2000,
        epochs=16,
        num_examples=55_000,
        published=tuple(
            Published("fiber", epsilon, value, "Table 15", std)
            for epsilon, value, std in ((0.5, 92.82, 0.22), (1, 92.94, 0.14), (2, 92.96, 0.11), (4, 93.00, 0.10), (8, 93.00, 0.09))
        ),
        grids={
            "epochs": (20, 40, 60),
            "batch_size": (2000, 5000),
            "lr": (0.5, 0.25, 0.05, 0.025),
            "omega": (0.9,),
            "kappa": (0.6,),
            "gamma": (0.7,),
        },
        # tuned on held-out rows (results/mnist-cnn-tuning.jsonl, results/search/), the last six taken from the nearest of these
        options={
            "dp-sgd": {"lr": 0.5},
            "dp-adamw": {"lr": 0.005},
            "disk": {"lr": 0.005},
            "fiber": {"lr": 0.001},
            "fiber-plus": {"lr": 0.01},
            "doppler": {"lr": 0.002, "b": (0.1,), "a": (1.0, -0.9)},  # the second-order default swings at any rate that was tried
            "mf-dp-ftrl": {"lr": 0.5},
            "fiber-nocorr": {"lr": 0.005},
            "fiber-tied": {"lr": 0.005},
            "fiber-bccorr": {"lr": 0.001},
            "fiber-lookahead": {"lr": 0.001},
            "disk-corr": {"lr": 0.001},
            "dp-adambc": {"lr": 0.001},
        },
        trials={"dp-sgd": 5, "dp-adamw": 5, "disk": 3, "fiber": 3, "fiber-plus": 5, "doppler": 6, "mf-dp-ftrl": 2},
        load=lambda data_dir: with_held_out(load_images(MNIST, data_dir), 5000),
        build=tramer_boneh_cnn,
        augmentation=CropFlip(padding=2, flip=False),
        row=lambda: blank_image(1, 28, 28),
    )


def fashion_cnn() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import FASHION_MNIST, load_images

    mnist = mnist_cnn()
    return replace(
        mnist,
        name="fashion-cnn",
        task="clothes 28x28",
        data=FASHION_MNIST.hub_name,
        paper="-",
        published=(),
        grids={},
        # tuned on held-out rows (results/search/); the other methods keep MNIST's
        trials={},
        options={**mnist.options, "dp-sgd": {"lr": 1.0}, "dp-adamw": {"lr": 0.02}, "fiber-plus": {"lr": 0.02}},
        load=lambda data_dir: with_held_out(load_images(FASHION_MNIST, data_dir), 5000),
        augmentation=CropFlip(padding=2, flip=True),
    )
