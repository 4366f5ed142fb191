"""ViT-small: ImageNet-1k from scratch (paper, Figure 2 and Table 18) and fine-tuning on CIFAR-100 (Table 1).

The paper gives no epochs, batch size or rate for Table 1; ours are those that DP fine-tuning of such models commonly has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from fiberdp.recipes.recipe import Published, Recipe, blank_image, by_logits, published, with_held_out

if TYPE_CHECKING:
    from torch import Tensor, nn

SIZE = 224
TABLE_1 = {
    "dp-adamw": (63.2, 78.0, 83.7, 85.7, 86.8),
    "disk": (83.5, 85.4, 86.8, 87.6, 88.5),
    "fiber": (88.6, 89.4, 90.0, 90.4, 90.5),
}


def vit_small(num_outputs: int, **size: int) -> nn.Module:
    """ViTForImageClassification with patches of 16 pixels; without dropout.  22,050,664 parameters at 1,000 outputs, or another size."""
    from fiberdp.recipes.tables import extra

    transformers = extra("transformers")
    small = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": SIZE}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=num_outputs, **none, **(small | size)))


def vit_logits(model: nn.Module, batch: Any) -> Tensor:
    """Pixels scaled to [-1, 1], enlarged to the size that the model reads: a function of each image alone."""
    from torch.nn.functional import interpolate

    from fiberdp.recipes.models import scale_pixels

    image = scale_pixels(batch["image"], next(model.parameters()).dtype)
    config: Any = model.config
    size = config.image_size
    if image.shape[-2:] != (size, size):
        image = interpolate(image, size=(size, size), mode="bilinear", align_corners=False)
    return model(pixel_values=image).logits


def imagenet_vit_small() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.image_files import IMAGENET, load_image_files

    return Recipe(
        name="imagenet-vit-small",
        task="photos, 1,000 classes",
        model="ViT-small, 22,050,664",
        data=IMAGENET.hub_name,
        paper="Table 18",
        cpu_minutes=None,
        epsilon=8.0,
        clip_norm=1.0,
        batch_size=5000,
        epochs=160,
        num_examples=1_271_167,
        published=(Published("fiber", 8, 44.8, "Table 18"), Published("disk", 8, 36.89, "Table 18"), Published("dp-adamw", 8, 39, "5.2")),
        grids={
            "epochs": (120, 160), "batch_size": (5000, 10_000), "lr": (0.01, 0.003, 0.001, 0.0003, 0.0001), "omega": (0.9,),
            "kappa": (0.6,), "gamma": (0.7,),
        },
        options={method: {"lr": 0.0003} for method in ("fiber", "disk", "dp-adamw")},  # Table 9's best; not tuned here
        load=lambda data_dir: load_image_files(IMAGENET, data_dir, size=SIZE, held_out=10_000),
        build=partial(vit_small, 1000),
        augmentation=CropFlip(padding=16, flip=True),
        row=lambda: blank_image(3, SIZE, SIZE),
        **by_logits(vit_logits),
    )  # fmt: skip


def cifar100_vit_small_ft() -> Recipe:
    from fiberdp.augmentation import CropFlip
    from fiberdp.recipes.data import CIFAR100, load_images
    from fiberdp.recipes.pretrained import Checkpoint, load_weights

    checkpoint = Checkpoint("WinKawaks/vit-small-patch16-224", ("vit-small-patch16-224",))
    return Recipe(
        name="cifar100-vit-small-ft",
        task="photos 32x32, 100 classes",
        model="ViT-small, 21,704,164",
        data=CIFAR100.hub_name,
        paper="Table 1",
        cpu_minutes=None,
        epsilon=1.0,
        clip_norm=1.0,
        batch_size=1000,
        epochs=5,
        num_examples=45_000,
        published=published("Table 1", (0.5, 1, 2, 4, 8), TABLE_1),
        options={method: {"lr": 0.0005} for method in ("fiber", "disk", "dp-adamw")},  # not tuned here
        load=lambda data_dir: with_held_out(load_images(CIFAR100, data_dir), 5000, sampled=True),
        build=partial(vit_small, 100),
        weights=partial(load_weights, checkpoint=checkpoint),
        augmentation=CropFlip(padding=4, flip=True),
        row=lambda: blank_image(3, 32, 32),
        **by_logits(vit_logits),
    )
