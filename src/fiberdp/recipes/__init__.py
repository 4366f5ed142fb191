"""Recipes: complete, tuned configurations of real tasks.  Adding one is a function and a line here."""

from collections.abc import Callable

from fiberdp.recipes.cifar10 import cifar10_cnn5
from fiberdp.recipes.digits import digits
from fiberdp.recipes.mnist import fashion_cnn, mnist_cnn
from fiberdp.recipes.recipe import Recipe

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "mnist-cnn": mnist_cnn,
    "fashion-cnn": fashion_cnn,
    "cifar10-cnn5": cifar10_cnn5,
}

__all__ = ["RECIPES", "Recipe"]
