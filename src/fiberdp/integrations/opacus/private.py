"""make_private and make_private_with_epsilon: Opacus's keywords in, a plan, and the objects that carry it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fiberdp import _validate
from fiberdp._random import Keys
from fiberdp._ranks import Ranks
from fiberdp.augmentation import NoAugmentation
from fiberdp.engines import GhostEngine, Loss, check_model, warn_of_dropout
from fiberdp.flat import FlatParameters
from fiberdp.integrations.opacus.by_ghost import GhostTape
from fiberdp.integrations.opacus.by_hooks import HookedTape
from fiberdp.integrations.opacus.call import CallLoss
from fiberdp.integrations.opacus.criterion import PrivateCriterion
from fiberdp.integrations.opacus.hooked import HooksEngine
from fiberdp.integrations.opacus.loader import Batches, batch_size_of, private_loader
from fiberdp.integrations.opacus.modules import GhostModule, HookedModule, unwrapped
from fiberdp.integrations.opacus.optimizer import PrivateOptimizer
from fiberdp.integrations.opacus.rules import tuned
from fiberdp.integrations.opacus.steps import Handed, OpacusSteps, steps_of
from fiberdp.integrations.opacus.tape import Tape
from fiberdp.methods import METHODS, Method
from fiberdp.methods import method as method_named
from fiberdp.planning import Plan, plan

MODES = ("hooks", "functorch", "ghost")
PRICED_BY = {"prv": "pld", "rdp": "rdp"}
"""Our accountant of the same kind as Opacus's."""


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    method: str | Method,
    privacy_engine: PrivacyEngine | None = None,
    criterion: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """`make_private` with sigma calibrated so that `epochs` passes cost at most (target_epsilon, target_delta)."""
    return _private(
        module, optimizer, data_loader, method, privacy_engine, criterion, options,
        {"epsilon": target_epsilon, "delta": target_delta, "epochs": epochs, "clip_norm": max_grad_norm},
    )  # fmt: skip


def make_private(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    method: str | Method,
    privacy_engine: PrivacyEngine | None = None,
    criterion: Callable[..., Any] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The user's module, optimizer, criterion and data loader, made to train with any method, privately; as PrivacyEngine's of that name.

    Returns (module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) if a criterion was given or the mode is ghost.

    method: a name, or a `fiberdp.Method`.  optimizer: torch's of the method's update rule (SGD or AdamW), whose numbers are used (lr,
    momentum, betas, eps, weight_decay) and whose param_groups stay in charge of lr.  criterion: needed by methods with two points or a
    look-ahead, unless the loop calls `optimizer.step(closure)`.  privacy_engine: its accountant gets every step.
    epochs, target_delta: T and delta of the plan; a run ends with its plan.
    Options of Opacus: grad_sample_mode ("hooks", "functorch", "ghost"); clipping, the clip rule ("flat", "automatic", "per_layer").
    poisson_sampling, batch_first, wrap_model, loss_reduction, rand_on_empty, noise_generator: as they are by default, or refused.
    Of ours: keys, or seed (reproducible, and not private against who knows it); ledger, a path: see `fiberdp.trainer.Run`.

    Guarantee: that of `fiberdp.trainer.Run` for what the returned optimizer releases: charged before it is released, noise proved before
    the first step.  The numbers are those of `plan.private` with the same keys, to rounding.
    Raises ValueError in one line, before anything is released, for what the plan refuses and for what cannot be trained privately.
    """
    return _private(
        module, optimizer, data_loader, method, privacy_engine, criterion, options,
        {"noise_multiplier": noise_multiplier, "delta": target_delta, "epochs": epochs, "clip_norm": max_grad_norm},
    )  # fmt: skip


def _private(
    module: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], method: str | Method, privacy_engine: Any,
    criterion: Callable[..., Any] | None, options: dict[str, Any], budget: dict[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    keys, ledger, mode, clip = _options(options, budget["clip_norm"])
    if (count := Ranks.joined().count) > 1:
        raise ValueError(
            f"make_private in {count} processes: the loop hands over sums of one process, and each would add noise of its own. Use "
            "Plan.private, which shares the work, or start one process."
        )
    if isinstance(module, DistributedDataParallel) or type(module).__name__.startswith("FSDP"):
        raise ValueError(
            f"module is {type(module).__name__}: training here is by one process, because each rank would add noise of its own. Give the "
            "module itself."
        )
    optimizer = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
    user = unwrapped(module)
    _check_module(user, optimizer, mode)
    chosen = method if isinstance(method, Method) else method_named(_validate.choice("method", method, tuple(METHODS)))
    if not isinstance(chosen.augmentation, NoAugmentation):
        raise ValueError(
            f"method.augmentation={chosen.augmentation!r}: the loop hands over batches that are made already, so copies of an example "
            "could not be told apart. Use Plan.private, or leave it out and augment in the data set."
        )
    accountant = _accountant(privacy_engine, chosen)
    agreed = plan(
        method=tuned(chosen, optimizer), num_examples=len(loader.dataset), batch_size=batch_size_of(loader), clip=clip,  # pyright: ignore
        accountant=None if accountant is None else PRICED_BY[accountant.mechanism()], **budget,
    )  # fmt: skip
    return _wired(agreed, user, optimizer, loader, criterion, mode, keys, ledger, accountant)


def _wired(
    agreed: Plan, user: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], criterion: Callable[..., Any] | None,
    mode: str, keys: Keys, ledger: str | None, accountant: IAccountant | None,
) -> tuple[Any, ...]:  # fmt: skip
    flat = FlatParameters(user)
    tape: Tape
    if mode == "ghost":
        criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        loss = CallLoss(criterion)
        tape = GhostTape(flat, loss, GhostEngine(flat, Loss(user, loss)))
        wrapped: Any = GhostModule(user)
    else:
        loss = CallLoss(criterion)
        reduction = "mean" if criterion is None else "sum"  # of the loop's own loss, or of ours
        try:
            wrapped = HookedModule(user, loss_reduction=reduction, force_functorch=mode == "functorch")
        except NotImplementedError as error:
            raise ValueError(
                f"module: Opacus's hooks refuse it ({' '.join(str(error).split())}): every layer that is trained needs per-example "
                "gradients. Use grad_sample_mode='ghost'."
            ) from error
        wrapped.forbid_grad_accumulation()
        tape = HookedTape(flat, loss, HooksEngine(flat, loss, wrapped))
    wrapped.tape = tape
    steps = OpacusSteps(agreed, user, flat, Handed(agreed, flat, keys, tape), ledger, accountant)
    tape.steps = steps
    batches = Batches(steps)
    private = PrivateOptimizer(optimizer, steps, tape, batches)
    given = () if criterion is None else (PrivateCriterion(criterion, wrapped, tape),)
    return (wrapped, private, *given, private_loader(loader, batches))


HONOURED = {"poisson_sampling": True, "batch_first": True, "wrap_model": True, "loss_reduction": "mean", "rand_on_empty": False}
WHY = {
    "poisson_sampling": "batches drawn otherwise are not the ones that are accounted for. For shuffled batches, without amplification, use "
    "fiberdp.plan(sampling='shuffle') and Plan.private",
    "batch_first": "examples are told apart by the first dimension. Transpose in the module",
    "wrap_model": "the training pass must be seen. Use the returned module",
    "loss_reduction": "the noisy sum is divided by the expected batch size, always. Multiply lr by it instead",
    "rand_on_empty": "an empty batch is a step of noise alone. Leave it out",
}


def _options(options: dict[str, Any], clip_norm: Any) -> tuple[Keys, str | None, str, str]:
    """(keys, ledger, mode, clip rule).  Raises ValueError for what is unknown or cannot be honoured."""
    left = dict(options)
    for name, value in HONOURED.items():
        if (given := left.pop(name, value)) != value:
            raise ValueError(f"{name}={given!r}: must be {value!r}, because {WHY[name]}.")
    if left.pop("noise_generator", None) is not None:
        raise ValueError(
            "noise_generator: noise comes from the run's keys (AES-256 in counter mode), because a generator's state cannot be addressed "
            "by step. For a reproducible run give seed=…."
        )
    clip = left.pop("clipping", "flat")
    if isinstance(clip_norm, Sequence):
        raise ValueError(
            f"max_grad_norm={clip_norm!r}: must be one number, because sigma is relative to one clip norm. With clipping='per_layer' every "
            "layer gets an equal part of it."
        )
    mode = _validate.choice("grad_sample_mode", left.pop("grad_sample_mode", "hooks"), MODES)
    keys, seed, ledger = left.pop("keys", None), left.pop("seed", None), left.pop("ledger", None)
    if keys is not None and seed is not None:
        raise ValueError("keys and seed: only one may be given, because each decides all randomness. Drop one.")
    if left:
        raise ValueError(
            f"no option {', '.join(sorted(left))}: an ignored option would mislead. Remove it; docs/from-opacus.md says what there is "
            "instead."
        )
    return keys or (Keys.secret() if seed is None else Keys.seeded(seed)), ledger, mode, clip


def _check_module(user: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> None:
    check_model(user)
    warn_of_dropout(user)
    if mode != "ghost" and (errors := ModuleValidator.validate(user, strict=False)):
        raise ValueError(f"module: Opacus refuses it: {' '.join(str(errors[0]).split())}")
    trained = [p for p in user.parameters() if p.requires_grad]
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if {id(p) for p in trained} != {id(p) for p in held}:
        raise ValueError(
            f"optimizer holds {len(held)} trainable parameters, module has {len(trained)}: they must be the same objects, because all that "
            "is trainable is trained, clipped and noised together. Make the optimizer from module.parameters(), after freezing and moving."
        )


def _accountant(privacy_engine: Any, method: Method) -> IAccountant | None:
    if privacy_engine is None:
        return None
    accountant: Any = privacy_engine.accountant
    if accountant.mechanism() not in PRICED_BY:
        raise ValueError(
            f"privacy_engine has accountant {accountant.mechanism()!r}: must be one of {', '.join(PRICED_BY)}, because its epsilon can be "
            "less than what a run costs. Use PrivacyEngine(accountant='prv')."
        )
    if method.mechanism.sampling != "poisson":
        raise ValueError(
            f"privacy_engine with noise {method.mechanism.name!r}: Opacus's accountants price Poisson samples with fresh noise, and would "
            "report another epsilon. Leave privacy_engine out and read optimizer.epsilon."
        )
    if steps_of(accountant):
        raise ValueError(
            f"privacy_engine has {steps_of(accountant)} steps in its history: it must be new, because the plan's epsilon is that of its "
            "own steps. Make a new PrivacyEngine; to go on with a run, load its states after this call."
        )
    return accountant
