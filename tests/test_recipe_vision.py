"""The image recipes beyond MNIST and CIFAR-10's CNN: frozen features, WRN-16-4, and ViT-small at full size and in small."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fiberdp
from fiberdp.checking import check
from fiberdp.recipes import RECIPES, recipe_named
from fiberdp.recipes.cifar10 import cifar10_features
from fiberdp.recipes.cifar100 import cifar100_wrn
from fiberdp.recipes.data import CIFAR10, CIFAR100, load_images
from fiberdp.recipes.image_files import IMAGENET, load_image_files
from fiberdp.recipes.recipe import blank_image, with_held_out
from fiberdp.recipes.vit import cifar100_vit_small_ft, imagenet_vit_small, vit_small

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
DATA = os.environ.get("FIBERDP_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="FIBERDP_DATA names no folder of data")


def few(data: dict, count: int) -> dict:
    return {name: {key: leaf[:count] for key, leaf in rows.items()} for name, rows in data.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is_without_data(name):
    made = recipe_named(name)
    assert made.name == name
    assert made.num_examples > 0
    assert 0 < made.delta(made.num_examples) < 1 / made.num_examples
    assert set(made.options) <= set(fiberdp.METHODS)
    assert all(row.method in fiberdp.METHODS and row.epsilon > 0 and row.place for row in made.published)


def test_parameters_at_full_size():
    count = {name: sum(p.numel() for p in recipe_named(name).build().parameters()) for name in ("cifar100-wrn", "cifar10-features")}
    assert count == {"cifar100-wrn": 2_772_020, "cifar10-features": 12_810}
    with torch.device("meta"):
        assert sum(p.numel() for p in vit_small(1000).parameters()) == 22_050_664
        assert sum(p.numel() for p in vit_small(100).parameters()) == 21_704_164


@pytest.mark.parametrize("make", [cifar100_wrn, cifar100_vit_small_ft, imagenet_vit_small, cifar10_features])
def test_engine_ghost_gives_the_oracles_sum(make):
    made = make()
    tiny = partial(vit_small, 10, **TINY) if made.weights or "vit" in made.name else made.build
    row = blank_image(3, 32, 32) if made.row and "image" in made.row() else made.row()
    torch.manual_seed(0)
    assert check(tiny(), made.loss, row, examples=2)["passed"]


@needs_data
def test_cifar100_sample_trains_the_tiny_vit_and_the_held_out_rows_are_a_quarter_at_most():
    data = with_held_out(load_images(CIFAR100, Path(DATA) / "cifar100_100_per_class"), 5000, sampled=True)
    assert {name: len(rows["label"]) for name, rows in data.items()} == {"train": 7500, "heldout": 2500, "test": 2000}
    made = replace(cifar100_vit_small_ft(), load=lambda data_dir: few(data, 60), build=partial(vit_small, 100, **TINY), weights=None)
    record = fiberdp.fit(made, method="fiber", batch_size=10, steps=2, seed=0)
    assert record["receipt"]["passed"]
    assert record["privacy"]["num_examples"] == 60


# images that are decoded when they are needed


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """24 training and 6 validation images of different sizes, modes and formats, as Parquet in the hub's layout."""
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    folder, rng = tmp_path_factory.mktemp("imagenet"), torch.Generator().manual_seed(0)

    def encoded(i: int) -> dict:
        height, width = (40 + 3 * i, 64) if i % 2 else (48, 33 + i)
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=rng).numpy()
        image, out = Image.fromarray(pixels).convert("L" if i % 5 == 0 else "RGB"), io.BytesIO()
        image.save(out, "PNG" if i % 3 else "JPEG")
        return {"bytes": out.getvalue(), "path": None}

    for split, count in (("train", 24), ("validation", 6)):
        rows = {"image": [encoded(i) for i in range(count)], "label": [i % 7 for i in range(count)]}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=1000)})
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_encoded_images_are_read_by_index_and_train_a_model(imagenet, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    data = load_image_files(IMAGENET, imagenet, size=32, held_out=10_000)
    assert {name: len(rows) for name, rows in data.items()} == {"train": 18, "heldout": 6, "test": 6}
    batch = data["train"].take(torch.tensor([3, 10]))
    assert batch["image"].shape == (2, 3, 32, 32)
    assert batch["image"].dtype == torch.uint8
    assert batch["label"].tolist() == [3, 3]
    assert torch.equal(data["train"].take(torch.tensor([10]))["image"][0], batch["image"][1])
    assert data["train"].take(torch.zeros(0, dtype=torch.int64))["image"].shape == (0, 3, 32, 32)
    made = replace(
        imagenet_vit_small(), load=lambda data_dir: data, build=partial(vit_small, 1000, **TINY), row=lambda: blank_image(3, 32, 32)
    )
    record = fiberdp.fit(made, method="fiber-lookahead", batch_size=6, steps=2, seed=0, out=tmp_path / "run")
    assert record["receipt"]["passed"]
    assert record["privacy"]["num_examples"] == 18


def test_a_label_outside_the_classes_is_refused(imagenet, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ValueError, match=r"labels run from 0 to 6; they must lie in \[0, 4\]"):
        load_image_files(replace(IMAGENET, num_classes=5), imagenet, size=32, held_out=5)


# frozen features


@pytest.fixture(scope="module")
def network():
    pytest.importorskip("efficientnet_lite_pytorch", reason="the network's package is not installed")
    from fiberdp.recipes.features import lite0, weights

    return lite0(weights())


def test_features_of_an_image_are_its_own(network):
    from fiberdp.recipes.features import features

    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = features(network, images, size=64).float()
    alone = torch.cat([features(network, image[None], size=64).float() for image in images])
    torch.testing.assert_close(found, alone, atol=2e-2, rtol=0)
    assert found.mean(1).abs().max() < 1e-3
    torch.testing.assert_close(found.var(1, correction=0), torch.ones(5), atol=1e-2, rtol=0)


@needs_data
def test_features_are_kept_for_the_user_alone_and_found_again_by_content(network, tmp_path, monkeypatch):
    from fiberdp.recipes import features as module

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = few(load_images(CIFAR10, DATA), 6)
    calls = []
    monkeypatch.setattr(module, "load_images", lambda *given: calls.append(given) or small)
    first = module.cached_features(CIFAR10, DATA, size=32)
    (kept,) = (tmp_path / "fiberdp" / "features").iterdir()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    again = module.cached_features(CIFAR10, DATA, size=32)
    assert len(calls) == 1
    assert torch.equal(first["train"]["features"], again["train"]["features"])
    assert torch.equal(first["test"]["label"], small["test"]["label"])
    other = module.cached_features(CIFAR10, DATA, size=40)
    assert len(calls) == 2
    assert not torch.equal(first["train"]["features"], other["train"]["features"])
