"""The update rule of a torch optimizer as a value: its numbers are the user's, and none of them is ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fiberdp.methods import Method
from fiberdp.optim import SGD, AdamW, Constant, WarmupCosine


def tuned(method: Method, optimizer: torch.optim.Optimizer) -> Method:
    """`method` with the update's numbers from `optimizer` and no schedule of its own: the learning rate is what param_groups says.

    Raises ValueError if the two have different update rules, for what the rule does not have (amsgrad, nesterov, …), for groups that
    differ, for a schedule that nothing would read, and for an optimizer that has taken steps already.
    """
    if method.schedule not in (WarmupCosine(), Constant()):
        raise ValueError(
            f"method.schedule={method.schedule!r}: here the learning rate is what the optimizer's param_groups say, so that torch's "
            "schedulers work, and a second schedule would be ignored. Leave it out and make a torch.optim.lr_scheduler on the optimizer."
        )
    if optimizer.state:
        raise ValueError(
            "optimizer has taken steps already: its state is one of gradients that were not private, and would be lost. Make a new one."
        )
    return replace(method, update=update_of(optimizer, method), schedule=Constant())


def update_of(optimizer: torch.optim.Optimizer, method: Method) -> Any:
    """The update of `optimizer`, by the numbers of its first group, as the kind that `method` needs."""
    groups = optimizer.param_groups
    settings = [_settings(optimizer, group) for group in groups]
    if any(other != settings[0] for other in settings):
        raise ValueError(
            f"optimizer has {len(groups)} param_groups with different numbers: all must agree, because the update is one over the whole "
            "parameter vector. Use one group."
        )
    kind, numbers, unknown = settings[0]
    wanted = type(method.update)
    if kind is not wanted:
        right = {AdamW: "torch.optim.AdamW", SGD: "torch.optim.SGD"}.get(wanted, wanted.__name__)
        raise ValueError(
            f"optimizer is {type(optimizer).__name__} with method {method.name!r}, which updates with {wanted.name}: they must be of one "
            f"kind, because a learning rate of one rule means nothing to another. Give {right}(…), or a method that updates as yours does."
        )
    if unknown:
        raise ValueError(
            f"optimizer has {', '.join(unknown)}: the private update has no such option, and an ignored one would mislead. Leave it out."
        )
    return replace(method.update, **numbers)


def rate(optimizer: torch.optim.Optimizer, method: Method) -> float:
    """The learning rate that param_groups say now.  Raises ValueError if groups differ, or if anything but the rate was changed."""
    found = {float(group["lr"]) for group in optimizer.param_groups}
    if len(found) > 1:
        raise ValueError(
            f"param_groups have the learning rates {sorted(found)}: all must agree, because the update is one over the whole parameter "
            "vector. Use a scheduler that sets one rate."
        )
    for group in optimizer.param_groups:
        for name in ("momentum", "betas", "eps", "weight_decay"):
            if name in group and hasattr(method.update, name) and group[name] != getattr(method.update, name):
                raise ValueError(
                    f"param_groups now have {name}={group[name]}, the plan {getattr(method.update, name)}: only the learning rate may "
                    "change in mid-run, because the filter's calibration holds for those numbers. With OneCycleLR use cycle_momentum=False."
                )
    (lr,) = found
    if not 0 <= lr < float("inf"):
        raise ValueError(f"param_groups have lr={lr}: it must be a finite number of at least 0, because it is the step size. Set it right.")
    return lr


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[type | None, dict[str, Any], tuple[str, ...]]:
    """(kind, its numbers, what of the group the kind does not have)."""
    lr = float(group.get("initial_lr", group["lr"]))  # a scheduler may have set the rate to 0 for its first step
    unknown = [name for name in ("amsgrad", "nesterov", "maximize", "differentiable") if group.get(name)]
    if isinstance(optimizer, torch.optim.SGD):
        unknown += ["dampening"] if group["dampening"] else []
        return SGD, {"lr": lr, "momentum": group["momentum"], "weight_decay": group["weight_decay"]}, tuple(unknown)
    if isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
        unknown += ["coupled weight_decay (AdamW's is decoupled)"] if group["weight_decay"] and not decoupled else []
        betas = tuple(float(beta) for beta in group["betas"])
        return AdamW, {"lr": lr, "betas": betas, "eps": group["eps"], "weight_decay": group["weight_decay"]}, tuple(unknown)
    return None, {}, ()
