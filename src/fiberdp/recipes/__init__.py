"""Recipes: complete, tuned configurations of real tasks.  Adding one is a function and a line here."""

from collections.abc import Callable

from fiberdp import _validate
from fiberdp.recipes.cifar10 import cifar10_cnn5, cifar10_features
from fiberdp.recipes.cifar100 import cifar100_wrn
from fiberdp.recipes.digits import digits
from fiberdp.recipes.e2e import e2e_gpt2, e2e_gpt2_small_scratch
from fiberdp.recipes.glue import GLUE
from fiberdp.recipes.mnist import fashion_cnn, mnist_cnn
from fiberdp.recipes.recipe import Recipe
from fiberdp.recipes.sst2 import sst2_minilm, sst2_minilm_lora
from fiberdp.recipes.vit import cifar100_vit_small_ft, imagenet_vit_small

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "mnist-cnn": mnist_cnn,
    "fashion-cnn": fashion_cnn,
    "cifar10-cnn5": cifar10_cnn5,
    "cifar10-features": cifar10_features,
    "cifar100-wrn": cifar100_wrn,
    "cifar100-vit-small-ft": cifar100_vit_small_ft,
    "imagenet-vit-small": imagenet_vit_small,
    "sst2-minilm": sst2_minilm,
    "sst2-minilm-lora": sst2_minilm_lora,
    **GLUE,
    "e2e-gpt2": e2e_gpt2,
    "e2e-gpt2-small-scratch": e2e_gpt2_small_scratch,
}


def recipe_named(recipe: str | Recipe) -> Recipe:
    """The recipe of that name; a recipe is itself.  Raises ValueError listing the names if there is none."""
    return recipe if isinstance(recipe, Recipe) else RECIPES[_validate.choice("recipe", recipe, tuple(RECIPES))]()


__all__ = ["RECIPES", "Recipe", "recipe_named"]
