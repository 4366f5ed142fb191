"""scikit-learn's 1,797 digits: a real data set that needs no download, for demonstrations and tests."""

from __future__ import annotations

from fiberdp.recipes.recipe import Recipe, classification_loss, with_held_out


def digits() -> Recipe:
    from fiberdp.recipes.data import load_digits
    from fiberdp.recipes.models import mlp_digits

    return Recipe(
        name="digits",
        task="digits 8x8",
        model="MLP, 3,610",
        data="scikit-learn",
        paper="none",
        cpu_minutes=0.3,
        epsilon=4.0,
        clip_norm=1.0,
        batch_size=256,
        epochs=30,
        options={},
        load=lambda data_dir: with_held_out(load_digits(), 240),
        build=mlp_digits,
        loss=classification_loss,
    )
