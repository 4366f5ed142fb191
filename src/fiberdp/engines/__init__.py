"""Engines: per-example observations, clipped and summed.  They see probes and a clip rule, and no method's name."""

from fiberdp.engines.choice import faster
from fiberdp.engines.ghost import GhostEngine
from fiberdp.engines.loop import LoopEngine
from fiberdp.engines.loss import PRECISIONS, Loss, LossFn, check_loss, check_model, warn_of_compiled, warn_of_dropout
from fiberdp.engines.proof import check_independent, compare, prove, rules
from fiberdp.engines.vmap import VmapEngine

ENGINES = {cls.name: cls for cls in (LoopEngine, VmapEngine, GhostEngine)}

__all__ = [
    "ENGINES", "PRECISIONS", "GhostEngine", "LoopEngine", "Loss", "LossFn", "VmapEngine", "check_independent", "check_loss", "check_model",
    "compare", "faster", "prove", "rules", "warn_of_compiled", "warn_of_dropout",
]  # fmt: skip
