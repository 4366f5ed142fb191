"""FiberDP: differentially private training for PyTorch, with noise that is proved in every run.

    fiberdp.fit("digits", method="fiber")                                    whole runs
    plan = fiberdp.plan(method="fiber", num_examples=…, …)                   your model, your loop body, our gate
    run  = plan.private(model, loss_fn, dataset)
    fiberdp.filters.Innovation(omega=0.9).update(g, state)                   blocks

Names are imported when first used, so that `import fiberdp` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fiberdp._version import __version__

if TYPE_CHECKING:
    from fiberdp._random import Keys
    from fiberdp.checking import check
    from fiberdp.experiment import fit
    from fiberdp.methods import METHODS, Method, method
    from fiberdp.planning import Plan, plan
    from fiberdp.recipes import RECIPES
    from fiberdp.statement import account
    from fiberdp.trainer import Run

_WHERE = {
    "Keys": "_random",
    "METHODS": "methods",
    "Method": "methods",
    "Plan": "planning",
    "RECIPES": "recipes",
    "Run": "trainer",
    "account": "statement",
    "check": "checking",
    "fit": "experiment",
    "method": "methods",
    "plan": "planning",
}
_PACKAGES = (
    "accounting", "augmentation", "clipping", "diagnostics", "engines", "filters", "mechanisms", "moments", "observation", "optim",
    "sampling",
)  # fmt: skip

__all__ = [
    "METHODS", "RECIPES", "Keys", "Method", "Plan", "Run", "__version__", "account", "check", "fit", "method", "plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"fiberdp.{_WHERE[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"fiberdp.{name}")
    raise AttributeError(f"module 'fiberdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
