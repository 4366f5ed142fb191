"""Update rules, schedules, and the optimizer that runs them behind a filter."""

from fiberdp.optim.adamw import AdamW
from fiberdp.optim.averaging import AVERAGINGS, EMAWeights, NoAveraging
from fiberdp.optim.optimizer import Optimizer
from fiberdp.optim.schedule import SCHEDULES, Constant, WarmupConstant, WarmupCosine, WarmupLinear
from fiberdp.optim.sgd import SGD

UPDATES = {cls.name: cls for cls in (AdamW, SGD)}

__all__ = [
    "AVERAGINGS", "SCHEDULES", "SGD", "UPDATES", "AdamW", "Constant", "EMAWeights", "NoAveraging", "Optimizer", "WarmupConstant",
    "WarmupCosine", "WarmupLinear",
]  # fmt: skip
