"""The user's model and loss as one function of a parameter dict, and the checks that make per-example gradients exist."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from fiberdp import _tree
from fiberdp.engines.tracing import nodes, visit
from fiberdp.flat import FlatParameters

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**10
"""What losses are multiplied with in fp16, and gradients divided by: entries of an example's gradient down to 6e-11 are told from 0, and
one above 64 makes its example not finite, which then contributes 0.  A constant: a scale that followed overflows would follow the data."""

LossFn = Callable[[nn.Module, Any], Tensor]


@contextmanager
def random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Run with torch's generators seeded (dropout, augmentation), and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed costs up to a millisecond, a hundred times more
        if device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        yield


@contextmanager
def saved_bytes(flat: FlatParameters) -> Iterator[list[int]]:
    """[bytes] that autograd keeps for the backward pass of what runs in this context, without the parameters; filled in at its end."""
    own = {p.untyped_storage().data_ptr() for p in flat.module.parameters()}
    found: dict[int, int] = {}
    total = [0]

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        yield total
    total[0] = sum(found.values())


class Loss(nn.Module):
    """loss_fn(module, batch) -> Tensor[b], one loss per example, callable with other parameters than the module's own.

    multiplicity: K, augmented copies an example.  If K > 1, every leaf of a batch that an engine gets is [b, K, …]; one example is
    then a batch of K rows to loss_fn, and its loss is their mean.
    precision: "float32", the parameters' own, or "bf16", "fp16": products in bfloat16 or float16 (torch.autocast), in the forward and
    backward pass only.
    compiled: parts of the model were given to torch.compile.  Engines run the layers as they were written, because compiled code hides
    what per-example gradients are made of; outside the engines (evaluation) it stays compiled.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFn, multiplicity: int = 1, precision: str = "float32") -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self.multiplicity = multiplicity
        self.precision = precision
        self.compiled = is_compiled(module)

    @property
    def exact(self) -> Loss:
        """The same in the parameters' own precision: what rules are chosen and engines compared by."""
        return Loss(self.module, self.loss_fn, self.multiplicity)

    @property
    def gradient_scale(self) -> float:
        """Engines multiply losses with it and divide gradients by it, a power of two: half precision would lose small gradients."""
        return FP16_SCALE if self.precision == "fp16" else 1.0

    def forward(self, batch: Any) -> Tensor:
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
            return self.loss_fn(self.module, batch)

    def at(self, parameters: Mapping[str, Tensor], batch: Any, rows: int) -> Tensor:
        """The losses of `batch` with these parameters.  Raises ValueError unless there is one per example."""
        device, half = next(iter(parameters.values())).device.type, PRECISIONS[self.precision]
        # without autocast's cache: it knows a weight by its address, and the points of a step have weights of their own
        with nullcontext() if half is None else torch.autocast(device, half, cache_enabled=False):
            losses = functional_call(self, {f"module.{name}": p for name, p in parameters.items()}, (batch,))
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"loss_fn returned {got} for {rows} examples: a tensor of shape ({rows},), one loss per example, is needed, because each "
                "example's gradient is clipped on its own. Use reduction='none' and average over tokens within an example."
            )
        return losses.float() if losses.dtype == half else losses

    def of_one(self, parameters: Mapping[str, Tensor], copies: Any) -> Tensor:
        """The loss of one example, a scalar: the mean over its K copies, the rows of `copies`."""
        return self.at(parameters, copies, self.multiplicity).mean()


def check_model(module: nn.Module) -> None:
    """Raise ValueError for layers through which one example's gradient depends on others, or that no engine can clip."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ValueError(
                f"layer {name} is {kind} in training mode: every example's loss may depend on that example only, and batch statistics mix "
                "them, so clipping would bound nothing. Use GroupNorm, or freeze its statistics with .eval()."
            )
        if isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
            raise ValueError(
                f"layer {name} is {kind} with track_running_stats=True: running statistics are computed from raw data without noise, so "
                "they would leak. Use track_running_stats=False."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise ValueError(
                f"layer {name} is {kind} with max_norm: it rescales the rows that a batch reads, so weights would change with the data and "
                "without noise. Leave it out."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            raise ValueError(
                f"layer {name} is {kind} with scale_grad_by_freq: an example's gradient must not depend on what else is in the batch. "
                "Leave it out."
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"layer {name} is {kind} with sparse=True: a parameter must have dense gradients to be clipped and noised in every row. "
                "Use sparse=False."
            )
        if layer.training and getattr(layer, "gradient_checkpointing", False) is True:
            raise ValueError(_checkpointed(f"layer {name or kind} has gradient_checkpointing on"))


def warn_of_dropout(module: nn.Module) -> None:
    """One warning if the model has dropout but is in eval mode, where it drops nothing: legal, and rarely meant."""
    if module.training:
        return
    for name, layer in module.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0:
            warnings.warn(
                f"layer {name} is {type(layer).__name__}(p={layer.p:g}) and the model is in eval mode: it will be trained without dropout. "
                "Call model.train() first if that is not meant.",
                stacklevel=4,
            )
            return


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it was given to torch.compile."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in module.modules())


def warn_of_compiled(module: nn.Module) -> None:
    """One warning if `is_compiled`: legal, and of little use."""
    if is_compiled(module):
        warnings.warn(
            "the model is compiled (torch.compile): training runs its layers as they were written, because compiled code hides what "
            "per-example gradients are made of. Only evaluation gains from it.",
            stacklevel=4,
        )


def check_loss(loss: Loss, parameters: Mapping[str, Tensor], row: Any) -> None:
    """Evaluate the loss once on two blank examples (K copies each), so that a wrong loss_fn is refused at set-up.

    Raises ValueError unless it is one loss per example, and for activation checkpointing.
    """
    device = next(iter(parameters.values())).device
    leaves = {name: view.detach().requires_grad_() for name, view in parameters.items()}
    with torch.enable_grad(), random_state(0, device), _NoCheckpoint():
        losses = loss.at(leaves, _tree.to(_tree.zeros(row, 2 * loss.multiplicity), device), 2 * loss.multiplicity)
    if any(node.name() == "CheckpointFunctionBackward" for node in visit(nodes([losses]))):
        raise ValueError(_checkpointed("the loss runs torch.utils.checkpoint(use_reentrant=True)"))


class _NoCheckpoint(TorchFunctionMode):
    """Refuses functions that run inside torch.utils.checkpoint without reentry: it is seen by its hooks on saved tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
        if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
            raise ValueError(_checkpointed("the loss runs torch.utils.checkpoint"))
        return func(*args, **(kwargs or {}))


def _checkpointed(what: str) -> str:
    return (
        f"{what}: activations must be kept, because layers that are run again in the backward pass would not run with the parameters of "
        "the point at which the gradient is taken. Use model.gradient_checkpointing_disable() or call the layers directly; a smaller "
        "micro_batch_size bounds memory."
    )
