"""For code that has Opacus's PrivacyEngine, GradSampleModule and BatchMemoryManager: any method, in the loop that is there.

    model, optimizer, criterion, loader = make_private_with_epsilon(
        privacy_engine=privacy_engine, method="fiber", criterion=criterion, module=model, optimizer=optimizer, data_loader=loader,
        target_epsilon=1.0, target_delta=1e-5, epochs=10, max_grad_norm=1.0,
    )

    loader      draws the plan's batches, from the run's keys
    model       Opacus's GradSampleModule: per-example gradients by its hooks, by functorch, or (ghost) by this library's engine
    criterion   one loss per example, evaluated at every point that the method looks at
    optimizer   clipped sum -> gate (charged in the ledger and in Opacus's accountant) -> filter, moments, update

What maps to what, what differs and what is refused: docs/from-opacus.md.
"""

try:
    import opacus as _opacus  # noqa: F401
except ImportError as error:
    raise ImportError("opacus is not installed: this integration is for code that has it. Use pip install 'fiberdp[opacus]'.") from error

from fiberdp.integrations.opacus.optimizer import PrivateOptimizer
from fiberdp.integrations.opacus.private import make_private, make_private_with_epsilon

__all__ = ["PrivateOptimizer", "make_private", "make_private_with_epsilon"]
