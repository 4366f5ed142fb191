"""Augmentation multiplicity: K copies of one example are one unit of sensitivity, and the same copies for every split, probe and engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

import fiberdp
from by_hand import clipped_by_hand
from fiberdp._random import Keys
from fiberdp.augmentation import AUGMENTATIONS, CropFlip, NoAugmentation
from fiberdp.clipping import CLIPS, Flat
from fiberdp.engines import ENGINES, Loss
from fiberdp.flat import FlatParameters
from fiberdp.methods import METHODS, Method, method
from fiberdp.recipes import RECIPES
from fiberdp.recipes.recipe import Recipe, classification_loss
from fiberdp.types import Probe
from test_run_directory import Crash, CrashAfter, contents, refused

PROBES = [Probe(0.05, 0.0), Probe(0.95, 0.7)]
SHAPE, N, K = (2, 8, 6), 40, 4
DRAWS = Keys.seeded(3).stream("augmentation")


def images(n: int, dtype=torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(n, *SHAPE, generator=generator, dtype=dtype)
    return {"image": image, "label": torch.randint(0, 3, (n,), generator=generator)}


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def uniforms(n: int, copies: int, step: int = 0) -> torch.Tensor:
    return DRAWS.uniform(step, 0, n * copies * 3).view(n, copies, 3)


def problem(copies: int, dtype=torch.float64):
    torch.manual_seed(1)
    model = network().to(dtype)
    flat = FlatParameters(model)
    return flat, Loss(model, classification_loss, copies), torch.randn_like(flat.theta)


def clipped(engine, flat, loss, d, batch, clip, probes=PROBES):
    return ENGINES[engine](flat, loss).clipped_sum(probes, d, batch, clip, seed=3).total


# ---- the copies ----


def crops_by_padding(image, uniform, padding, flip):
    """A second route: torch's own reflection padding, then slices, one copy at a time."""
    padded = nn.functional.pad(image.double(), (padding,) * 4, mode="reflect")
    top, left = (int(float(u) * (2 * padding + 1)) for u in uniform[:2])
    crop = padded[..., top : top + image.shape[-2], left : left + image.shape[-1]]
    return (crop.flip(-1) if flip and float(uniform[2]) < 0.5 else crop).to(image.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize(("padding", "flip"), [(0, False), (0, True), (2, False), (3, True), (5, True)])
def test_copies_are_crops_of_the_reflected_image(padding, flip, dtype):
    batch = {"image": (images(5)["image"] * 50 + 100).to(dtype), "label": torch.arange(5)}
    u = uniforms(5, 7)
    got = CropFlip(multiplicity=7, padding=padding, flip=flip).apply(batch, u)
    assert got["image"].shape == (5, 7, *SHAPE)
    assert got["image"].dtype == dtype
    for i in range(5):
        for k in range(7):
            assert torch.equal(got["image"][i, k], crops_by_padding(batch["image"][i], u[i, k], padding, flip))
    assert torch.equal(got["label"], torch.arange(5)[:, None].expand(5, 7))


def test_every_shift_and_mirror_is_equally_likely():
    """25 shifts x 2 mirrors, 20,000 copies: chi^2 with 49 degrees, false alarm 1e-6.  Rejected: one draw for both axes."""
    image = torch.arange(81.0).view(1, 1, 9, 9)

    def chi_square(u):
        got = CropFlip(multiplicity=u.shape[1], padding=2).apply(image, u)[0, :, 0]
        cells = got[:, 4, 4] * 2 + (got[:, 4, 3] > got[:, 4, 5])
        _, counts = cells.unique(return_counts=True)
        expected = u.shape[1] / 50
        return float((counts - expected).square().sum() / expected) + (50 - len(counts)) * expected

    u, limit = uniforms(1, 20_000), stats.chi2.isf(1e-6, 49)
    assert chi_square(u) < limit
    assert chi_square(torch.stack([u[..., 0], u[..., 0], u[..., 2]], -1)) > limit


def test_images_of_one_example_move_together_and_the_rest_is_repeated():
    picture, ids = images(3)["image"], torch.arange(6).view(3, 2)
    got, (mask, again, text) = CropFlip(multiplicity=2, padding=1).apply((picture, (picture > 0.5, ids, ["a", "b", "c"])), uniforms(3, 2))
    assert torch.equal(mask, (picture > 0.5)[:, None].expand(3, 2, *SHAPE))  # bool: not an image, so not moved
    assert torch.equal(again, ids[:, None].expand(3, 2, 2))
    assert text == [["a", "a"], ["b", "b"], ["c", "c"]]
    both = CropFlip(multiplicity=2, padding=1).apply((picture, 2 * picture), uniforms(3, 2))
    assert torch.equal(both[1], 2 * both[0])
    assert torch.equal(both[0], got)


def test_an_empty_batch_stays_empty():
    got = CropFlip(multiplicity=3, padding=1).apply(images(0), uniforms(0, 3))
    assert got["image"].shape == (0, 3, *SHAPE)
    assert got["label"].shape == (0, 3)


# ---- the engines ----


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip", CLIPS)
def test_observation_is_the_mean_of_the_copies_gradients_clipped_once(engine, clip):
    """The oracle: backward() on one copy at a time, averaged over K, combined over the probes, and clipped by hand."""
    flat, loss, d = problem(K)
    batch = CropFlip(multiplicity=K, padding=2).apply(images(5), uniforms(5, K))
    rule, theta, expected = CLIPS[clip](clip_norm=0.3), flat.theta.clone(), torch.zeros_like(flat.theta)
    for i in range(5):
        u = torch.zeros_like(theta)
        for probe in PROBES:
            flat.theta.copy_(theta + probe.lookahead * d)
            for k in range(K):
                flat.module.zero_grad()
                nn.functional.cross_entropy(flat.module(batch["image"][i, k : k + 1]), batch["label"][i, k : k + 1]).backward()
                u += probe.weight / K * torch.cat([p.grad.reshape(-1) for p in flat.module.parameters()])
        expected += clipped_by_hand(rule, u, flat.slots)
    flat.theta.copy_(theta)
    torch.testing.assert_close(clipped(engine, flat, loss, d, batch, rule), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("copies", [1, 2, K])
def test_copies_that_are_all_the_example_itself_change_nothing(engine, copies):
    flat, loss, d = problem(copies)
    still = CropFlip(multiplicity=copies, padding=0, flip=False).apply(images(6), uniforms(6, copies))
    plain = clipped(engine, flat, Loss(flat.module, classification_loss), d, images(6), Flat(clip_norm=0.3))
    ours = clipped(engine, flat, loss, d, still, Flat(clip_norm=0.3))
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-13)
    assert copies > 1 or torch.equal(ours, plain)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", ENGINES)
def test_sensitivity_is_at_most_C_with_copies_for_any_example(engine, clip):
    """Adding one example, however extreme, moves the float32 sum by at most C, and replacing one by at most 2C: K does not enter."""
    flat, loss, d = problem(K, torch.float32)
    rule, augmentation, u = CLIPS[clip](clip_norm=0.37), CropFlip(multiplicity=K, padding=2), uniforms(6, K)
    five = images(5, torch.float32)
    without = clipped(engine, flat, loss, d, augmentation.apply(five, u[:5]), rule).double()
    moved = []
    for scale in (1e-30, 1.0, 1e3, 1e30, math.nan, math.inf):
        more = {"image": torch.cat([five["image"], scale * torch.ones(1, *SHAPE)]), "label": torch.cat([five["label"], torch.tensor([2])])}
        moved.append(clipped(engine, flat, loss, d, augmentation.apply(more, u), rule).double() - without)
    slack = 1e-6 * float(without.norm())  # the sums are each rounded to float32
    assert all(float(m.norm()) <= 0.37 + slack for m in moved)
    assert all(float((a - b).norm()) <= 2 * 0.37 + 2 * slack for a in moved for b in moved)
    assert max(float(m.norm()) for m in moved) > 0.3


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_each_copy_apart_would_break_the_sensitivity(engine):
    """The test above has power: copies taken for examples of their own move the sum by up to K C."""
    flat, loss, d = problem(K)
    batch = CropFlip(multiplicity=K, padding=2).apply({"image": 1e3 * images(1)["image"], "label": torch.tensor([0])}, uniforms(1, K))
    apart = {name: leaf.flatten(0, 1) for name, leaf in batch.items()}
    assert float(clipped(engine, flat, Loss(flat.module, classification_loss), d, apart, Flat(clip_norm=0.37)).norm()) > 2 * 0.37
    assert float(clipped(engine, flat, loss, d, batch, Flat(clip_norm=0.37)).norm()) <= 0.37


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_copy_that_is_not_finite_silences_the_example(engine, value):
    flat, loss, d = problem(K)
    batch = CropFlip(multiplicity=K, padding=2).apply(images(4), uniforms(4, K))
    expected = clipped(engine, flat, loss, d, {name: leaf[[0, 1, 3]] for name, leaf in batch.items()}, Flat(clip_norm=0.3))
    batch["image"][2, 1, 0, 0, 0] = value
    torch.testing.assert_close(clipped(engine, flat, loss, d, batch, Flat(clip_norm=0.3)), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_empty_batch_of_copies_gives_zeros(engine):
    flat, loss, d = problem(K)
    batch = CropFlip(multiplicity=K, padding=2).apply(images(0), uniforms(0, K))
    assert not clipped(engine, flat, loss, d, batch, Flat(clip_norm=0.3)).any()


def test_micro_batch_counts_copies():
    flat, _, _ = problem(1)
    sizes = [
        ENGINES["vmap"](flat, Loss(flat.module, classification_loss, k)).micro_batch_size(images(1), 2, 256)
        for k in (1, 2, 3, 16, 256, 1000)
    ]
    assert sizes == [256, 128, 64, 16, 1, 1]
    tight = [
        ENGINES["vmap"](flat, Loss(flat.module, classification_loss, k), memory_budget=2**18).micro_batch_size(images(1), 2, 256)
        for k in (1, 32)
    ]
    assert tight[0] > tight[1]


# ---- the run ----


def augmented(name: str = "fiber", copies: int = K, **options) -> Method:
    return replace(method(name, **options), augmentation=CropFlip(multiplicity=copies, padding=2))


def run(chosen: Method, *, split: int = 256, engine: str = "vmap", rows=None, steps: int = 5, sigma: float = 0.0):
    torch.manual_seed(1)
    plan = fiberdp.plan(
        method=chosen, num_examples=N, batch_size=10, steps=steps, noise_multiplier=sigma, delta=1e-3, clip_norm=0.5
    )  # fmt: skip
    model = network().double()
    return plan.private(model, classification_loss, rows or images(N), keys=Keys.seeded(2), engine=engine, micro_batch_size=split)


def trained(chosen: Method, **options) -> torch.Tensor:
    made = run(chosen, **options)
    for _ in made:
        pass
    return made.flat.theta


@pytest.mark.parametrize("split", [1, 3, 7])
@pytest.mark.parametrize("copies", [1, K])
def test_micro_batches_change_no_copy(split, copies):
    whole = trained(augmented(copies=copies))
    torch.testing.assert_close(trained(augmented(copies=copies), split=split), whole, rtol=1e-9, atol=1e-12)


def test_loop_and_vmap_train_to_the_same_weights():
    torch.testing.assert_close(trained(augmented(), engine="loop"), trained(augmented()), rtol=1e-7, atol=1e-10)


def test_copies_differ_between_steps_and_from_no_augmentation():
    made = run(augmented())
    batch = images(10)
    first, again, later = (made.pipeline._augmented(batch, step, 0, 10)["image"] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert torch.equal(made.pipeline._augmented({name: leaf[4:] for name, leaf in batch.items()}, 0, 4, 6)["image"], first[4:])
    assert not torch.allclose(trained(augmented()), trained(method("fiber")))


@pytest.mark.parametrize("name", ["dp-adamw", "fiber"])
def test_one_copy_without_crop_and_mirror_is_no_augmentation_exactly(name):
    still = replace(method(name), augmentation=CropFlip(multiplicity=1, padding=0, flip=False))
    assert torch.equal(trained(still, sigma=1.0), trained(method(name), sigma=1.0))


def test_both_probes_see_the_same_copies(monkeypatch):
    """With d = 0 (a vector, not None), weights 2 and -1 must give the one-point gradient: they would not if each drew its own copies."""
    made, seen = run(augmented()), {}
    for name, probes in {"one": [Probe(1.0, 0.0)], "mixed": [Probe(-1.0, 0.0), Probe(2.0, 0.5)]}.items():
        monkeypatch.setattr(fiberdp.observation.TwoPoint, "probes", lambda _, probes=probes: probes)
        seen[name] = made.pipeline.release(3, torch.zeros_like(made.flat.theta)).value
    torch.testing.assert_close(seen["mixed"], seen["one"], rtol=1e-10, atol=1e-13)
    assert seen["one"].any()


def test_the_receipt_drives_blank_copies_through_the_same_engine():
    made = run(augmented(), sigma=1.0)
    shapes = []
    real = made.pipeline.engine.clipped_sum

    def seen(probes, d, batch, clip, **options):
        shapes.append((tuple(batch["image"].shape[1:]), options["loss_scale"], bool(batch["image"].any())))
        return real(probes, d, batch, clip, **options)

    made.pipeline.engine.clipped_sum = seen
    receipt = made.prove()
    assert receipt.passed
    assert set(shapes) == {((K, *SHAPE), 0.0, False)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"image": torch.zeros(N, 6), "label": torch.zeros(N, dtype=torch.long)}, r"crop_flip on a batch of torch.float32 \(2, 6\), "),
        ({"image": torch.zeros(N, 1, 2, 9), "label": torch.zeros(N, dtype=torch.long)}, "padding=2 with images of 2x9"),
    ],
)
def test_rows_that_are_no_images_are_refused_at_set_up(rows, said):
    plan = fiberdp.plan(method=augmented(), num_examples=N, batch_size=10, steps=1, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(rows["image"][0].numel(), 3))
    with pytest.raises(ValueError, match=said) as error:
        plan.private(model, classification_loss, rows)
    assert "\n" not in str(error.value)


# ---- methods, recipes, run directory ----


@pytest.mark.parametrize("options", [{"multiplicity": 0}, {"multiplicity": 2.0}, {"padding": -1}, {"flip": 1}])
def test_bad_augmentations_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        CropFlip(**options)


def test_method_round_trips_with_augmentation_and_the_table_has_none():
    assert list(AUGMENTATIONS) == ["none", "crop_flip"]
    assert all(m.augmentation == NoAugmentation() for m in METHODS.values())
    chosen = augmented()
    assert chosen.to_json()["augmentation"] == {"type": "crop_flip", "multiplicity": K, "padding": 2, "flip": True}
    assert Method.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_multiplicity_of_a_method_without_augmentation_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"method fiber has no option multiplicity.*augmentation=CropFlip\(multiplicity=…\)"):
        method("fiber", multiplicity=8)


def test_image_recipes_say_how_they_make_copies():
    assert {name: made for name, make in RECIPES.items() if (made := make().augmentation)} == {
        "digits": CropFlip(padding=1, flip=False),
        "mnist-cnn": CropFlip(padding=2, flip=False),
        "fashion-cnn": CropFlip(padding=2, flip=True),
        "cifar10-cnn5": CropFlip(padding=4, flip=True),
        "cifar100-wrn": CropFlip(padding=4, flip=True),
        "cifar100-vit-small-ft": CropFlip(padding=4, flip=True),
        "imagenet-vit-small": CropFlip(padding=16, flip=True),
    }


def recipe(**changes) -> Recipe:
    data = {name: images(n, torch.float32, seed) for name, n, seed in (("train", 60, 1), ("heldout", 30, 2), ("test", 30, 3))}
    made = Recipe(
        name="tiny", task="", model="", data="", paper="", cpu_minutes=0, epsilon=3.0, clip_norm=1.0, batch_size=15, epochs=3,
        num_examples=60, options={}, load=lambda data_dir: data, loss=classification_loss, build=network, augmentation=CropFlip(padding=1),
    )  # fmt: skip
    return replace(made, **changes)


def test_resumed_run_with_copies_is_bit_equal_to_the_uninterrupted_one(tmp_path):
    options = {"multiplicity": 3, "seed": 7, "micro_batch_size": 8}
    whole = fiberdp.fit(recipe(), out=tmp_path / "whole", **options)
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), out=tmp_path / "broken", reporter=CrashAfter(6), **options)
    resumed = fiberdp.fit(recipe(), out=tmp_path / "broken", resume=True, **options)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert resumed["result"] == whole["result"]
    assert whole["config"]["plan"]["method"]["augmentation"] == {"type": "crop_flip", "multiplicity": 3, "padding": 1, "flip": True}
    plain = fiberdp.fit(recipe(), **{**options, "multiplicity": None})
    assert plain["privacy"] == whole["privacy"]  # K costs nothing
    assert plain["config"]["plan"]["method"]["augmentation"] == {"type": "none"}


def test_resume_with_another_multiplicity_is_refused(tmp_path):
    with pytest.raises(Crash):
        fiberdp.fit(recipe(), seed=7, multiplicity=3, out=tmp_path / "a", reporter=CrashAfter(6))
    refused("resume with plan.method.augmentation.multiplicity=2", recipe=recipe(), seed=7, multiplicity=2, out=tmp_path / "a", resume=True)


def test_multiplicity_of_a_recipe_without_augmentation_is_refused(tmp_path):
    refused("recipe tiny.*no augmentation", recipe=recipe(augmentation=None), multiplicity=2, out=tmp_path / "a")
    refused("multiplicity=0", recipe=recipe(), multiplicity=0, out=tmp_path / "a")
    assert not list(tmp_path.iterdir())
    own = fiberdp.fit(recipe(augmentation=None), method=augmented(), multiplicity=2)  # the method brings its own
    assert own["config"]["plan"]["method"]["augmentation"]["padding"] == 2
