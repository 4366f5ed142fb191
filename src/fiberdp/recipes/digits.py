"""scikit-learn's 1,797 digits: a real data set that needs no download, for demonstrations and tests."""

from __future__ import annotations

from fiberdp.recipes.recipe import Recipe, blank_image, with_held_out


def digits() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import load_digits
    from fiberdp.recipes.models import mlp_digits

    return Recipe(
        name="digits",
        task="digits 8x8",
        model="MLP, 3,610",
        data="scikit-learn",
        paper="none",
        cpu_minutes=0.1,
        epsilon=4.0,
        clip_norm=1.0,
        batch_size=256,
        epochs=30,
        num_examples=1_300,
        # tuned on held-out rows (results/digits-tuning.jsonl, digits-search.jsonl), the last six taken from the nearest of these
        options={
            "dp-sgd": {"lr": 0.5},
            "dp-adamw": {"lr": 0.04},
            "disk": {"lr": 0.02},
            "fiber": {"lr": 0.00125},
            "fiber-plus": {"lr": 0.04},
            "doppler": {"lr": 0.004, "b": (0.1,), "a": (1.0, -0.9)},  # better than the second-order default at any rate that was tried
            "mf-dp-ftrl": {"lr": 0.25, "bands": 4},
            "fiber-nocorr": {"lr": 0.02},
            "fiber-tied": {"lr": 0.02},
            "fiber-bccorr": {"lr": 0.00125},
            "fiber-lookahead": {"lr": 0.00125},
            "disk-corr": {"lr": 0.00125},
            "dp-adambc": {"lr": 0.00125},
        },
        trials={"dp-sgd": 7, "dp-adamw": 7, "disk": 7, "fiber": 7, "fiber-plus": 4, "doppler": 10, "mf-dp-ftrl": 3},
        load=lambda data_dir: with_held_out(load_digits(), 240),
        build=mlp_digits,
        augmentation=CropFlip(padding=1, flip=False),
        row=lambda: blank_image(1, 8, 8, floating=True),
    )
