"""From TrainingArguments and PrivacyArguments to a plan; every argument is used, passed on to the Trainer, or refused.

    used     has a private meaning, which is the plan's or the loop's
    passed   reaches the Trainer's own code (evaluation, logging, saving, the hub) and cannot touch a training step
    refused  unless it is off: it would change what a step releases, or nothing would read it

An argument that none of the three names, because a later transformers brought it, is refused unless it has its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fiberdp import _validate
from fiberdp.methods import METHODS, Method
from fiberdp.methods import method as method_named
from fiberdp.optim import AdamW, Constant, WarmupConstant, WarmupCosine, WarmupLinear
from fiberdp.planning import Plan, plan

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """What TrainingArguments cannot say.  delta, clip_norm and one of epsilon and noise_multiplier must be given: none has a default.

    method: a name of `fiberdp.METHODS`, or a composed `fiberdp.Method`.  options: of a named method (omega, kappa, momentum, ...), without
    those that TrainingArguments has: learning rate, betas, eps, weight decay and schedule come from there.  clip, sampling, groups,
    accountant: see `fiberdp.plan`.  engine: see `fiberdp.trainer.Run`.

    seed: derive every random number of the private steps from it: reproducible, and not private against who knows it.  Left out, keys are
    secret; TrainingArguments.seed never makes keys, because anyone knows it.
    secret_dir: where checkpoints keep the keys, for the owner's eyes only; `<output_dir>-secret` by default, beside what is published.
    """

    delta: float
    clip_norm: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    method: str | Method = "fiber"
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: str = "flat"
    sampling: str | None = None
    groups: int | None = None
    accountant: str | None = None
    engine: str = "ghost"
    seed: int | None = None
    secret_dir: str | None = None


USED = (
    "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing_factor", "bf16",
    "fp16", "logging_strategy", "logging_steps", "logging_first_step", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start",
    "save_strategy", "save_steps", "save_only_model", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "restore_callback_states_from_checkpoint", "remove_unused_columns", "train_sampling_strategy",
    "length_column_name",
)  # fmt: skip

PASSED = (
    "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
    "include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "use_cache", "label_names",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "accelerator_config", "log_on_each_node", "logging_nan_inf_filter",
    "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "save_on_each_node", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "full_determinism", "seed", "use_cpu", "average_tokens_across_devices", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank", "skip_memory_metrics",
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "fsdp_config", "torch_compile_backend", "torch_compile_mode",
    "liger_kernel_config", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs",
)  # fmt: skip
"""Among them what belongs to a refused switch (fsdp_config, ...) and does nothing without it."""

_CHECKPOINTING = (
    (None, False),
    "activations must be kept, because layers that are run again in the backward pass would not run at the point at which the gradient is "
    "taken. Leave it out; a smaller per_device_train_batch_size with more gradient_accumulation_steps bounds memory",
)
_ONE_PROCESS = ((None, False, "", []), "a step is released by one process, which draws its noise. Leave it out")

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "max_grad_norm": (
        (1.0, 0.0, None),
        "each example's gradient is clipped on its own, to PrivacyArguments.clip_norm; clipping the batch's protects nobody. Leave it out",
    ),
    "lr_scheduler_kwargs": ((None, {}), "the schedules that are taken have no further options. Leave it out"),
    "optim_args": ((None,), "the update is the method's, which has PrivacyArguments.options. Put them there"),
    "optim_target_modules": ((None,), "the optimizer sees released gradients of all trained parameters alike. Leave it out"),
    "tf32": ((None, False), "products in TF32 are 1e-3 off, so that a norm, and with it the sensitivity, would be. Leave it out"),
    "activation_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing": _CHECKPOINTING,
    "torch_compile": ((False,), "a compiled model hides the layers whose gradients are clipped example by example. Leave it out"),
    "use_liger_kernel": ((False,), "fused kernels hide the layers whose gradients are clipped example by example. Leave it out"),
    "neftune_noise_alpha": ((None,), "its noise depends on how long the other rows of the batch are, so examples would meet. Leave it out"),
    "torch_empty_cache_steps": ((None,), "nothing in a private step reads it. Leave it out"),
    "auto_find_batch_size": (
        (False,),
        "after a failure it would train again from the start, which would release twice what was charged once. Choose "
        "per_device_train_batch_size, which bounds memory, and gradient_accumulation_steps",
    ),
    "include_num_input_tokens_seen": (("no", False, None), "the number of tokens of a batch is raw data. Leave it out"),
    "enable_jit_checkpoint": ((False,), "it saves within a step, when it is charged and not yet taken. Use save_steps"),
    "ignore_data_skip": ((False,), "the batch of a step follows from its number, so nothing is skipped or drawn anew. Leave it out"),
    "data_seed": ((None,), "batches are drawn with the run's keys, which are secret. Use PrivacyArguments.seed for a reproducible run"),
    "parallelism_config": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "deepspeed": _ONE_PROCESS,
    "dataloader_drop_last": ((False,), "the plan's sampler draws the batches; none is the last. Leave it out"),
    "debug": ((None, "", []), "it prints extremes of activations, which are raw data. Leave it out"),
    "optim": (
        ("adamw_torch_fused", "adamw_torch", "sgd"),
        "the update is the method's: AdamW, or SGD of dp-sgd. Leave it out and choose PrivacyArguments.method",
    ),
}
"""name -> (values that are taken, why no other is, and what to do)."""

_SCHEDULES = {"linear": WarmupLinear, "cosine": WarmupCosine, "constant": Constant, "constant_with_warmup": WarmupConstant}
_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_RATES = {"learning_rate": 5e-5, "weight_decay": 0.0, "lr_scheduler_type": "linear", "warmup_steps": 0} | _ADAM
"""What a composed method says itself, with the defaults of TrainingArguments."""
_OURS = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}


def check_arguments(args: TrainingArguments, privacy: PrivacyArguments) -> None:
    """Raise ValueError, in one line, for the first argument that a private run cannot honour."""
    for known in dataclasses.fields(args):
        name, value = known.name, getattr(args, known.name)
        if name in REFUSED:
            allowed, why = REFUSED[name]
            if not any(_same(value, taken) for taken in allowed):
                shown = ", ".join(map(repr, allowed))
                raise ValueError(f"TrainingArguments.{name}={_plain(value)!r}: a private run takes {shown} only, because {why}.")
        elif name not in USED and name not in PASSED and known.default is not dataclasses.MISSING and value != known.default:
            raise ValueError(
                f"TrainingArguments.{name}={value!r}: PrivateTrainer does not know this argument, and one that is ignored, or that reaches "
                "into a step, is refused. Leave it at its default."
            )
    _validate.choice("TrainingArguments.lr_scheduler_type", _plain(args.lr_scheduler_type), tuple(_SCHEDULES))
    _validate.choice(
        "TrainingArguments.train_sampling_strategy",
        _plain(args.train_sampling_strategy),
        ("random", "group_by_length"),
        why="The plan's sampler draws the batches; group_by_length puts the rows of a batch in order.",
    )
    secret_folder_of(args, privacy)
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            f"{max(args.world_size, args.n_gpu)} devices: a private run has one, because each process would draw noise of its own and wrap "
            "the model. Start one process, with one device in CUDA_VISIBLE_DEVICES."
        )
    if _plain(args.optim) == "sgd" and isinstance(method_of(args, privacy, 1).update, AdamW):
        raise ValueError("TrainingArguments.optim='sgd': the method's update is AdamW, and it decides. Choose method='dp-sgd'.")


def secret_folder_of(args: TrainingArguments, privacy: PrivacyArguments) -> Path:
    """Where the keys lie.  Raises ValueError if that is inside output_dir, which is what gets published."""
    out = Path(str(args.output_dir)).resolve()
    secret = Path(privacy.secret_dir).resolve() if privacy.secret_dir else out.with_name(f"{out.name}-secret")
    if secret.is_relative_to(out):
        raise ValueError(
            f"secret_dir={privacy.secret_dir!r}: must lie outside output_dir={str(args.output_dir)!r}, because that is published "
            "and the keys take the noise off. Choose another, or leave it out."
        )
    return secret


def plan_of(args: TrainingArguments, privacy: PrivacyArguments, num_examples: int) -> Plan:
    """The plan of a run over `num_examples` rows.

    B = per_device_train_batch_size * gradient_accumulation_steps, expected.  T = max_steps, or ceil(num_train_epochs * floor(N/B)).
    Raises ValueError for anything out of range.
    """
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rest: dict[str, Any] = {
        "num_examples": num_examples, "batch_size": batch_size, "epsilon": privacy.epsilon, "noise_multiplier": privacy.noise_multiplier,
        "delta": privacy.delta, "clip_norm": privacy.clip_norm, "clip": privacy.clip, "sampling": privacy.sampling,
        "groups": privacy.groups, "accountant": privacy.accountant,
    }  # fmt: skip
    steps = args.max_steps
    if steps <= 0:
        _validate.positive("TrainingArguments.num_train_epochs", args.num_train_epochs, why="It is how often a row is expected to be used.")
        per_epoch = num_examples // batch_size
        if not per_epoch:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps = {batch_size} with {num_examples} rows: an expected batch "
                "must be no larger than the data set, because each row is drawn with probability B/N. Make one of them smaller."
            )
        steps = -int(-args.num_train_epochs * per_epoch // 1)
    return plan(method=method_of(args, privacy, steps), steps=steps, **rest)


def method_of(args: TrainingArguments, privacy: PrivacyArguments, steps: int) -> Method:
    """The named method with the rates of TrainingArguments; or the composed one, as it is."""
    if not isinstance(privacy.method, str):
        said = [name for name, default in _RATES.items() if not _same(getattr(args, name), default)]
        if said or privacy.options:
            raise ValueError(
                f"{', '.join(said) or 'options'} with a composed method: it already says everything, and nothing would read what is said "
                "twice. Use dataclasses.replace on the method."
            )
        return privacy.method
    base = METHODS[_validate.choice("method", privacy.method, tuple(METHODS))]
    for option, argument in _OURS.items():
        if option in privacy.options:
            raise ValueError(f"options: {option} is TrainingArguments.{argument}, because one number has one place. Give it there.")
    rates: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if isinstance(base.update, AdamW):
        rates |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    else:
        unread = [name for name, default in _ADAM.items() if getattr(args, name) != default]
        if unread:
            raise ValueError(f"{', '.join(unread)} with method {base.name}: its update is SGD, which has none of them. Leave them out.")
    chosen = method_named(privacy.method, **privacy.options)
    return replace(chosen, update=replace(chosen.update, **rates), schedule=_schedule(args, steps))


def _schedule(args: TrainingArguments, steps: int) -> Any:
    kind, rising = _plain(args.lr_scheduler_type), args.warmup_steps
    if kind == "constant":
        if rising:
            raise ValueError(
                f"warmup_steps={rising} with lr_scheduler_type='constant': that schedule has no warm-up. Use 'constant_with_warmup'."
            )
        return Constant()
    if rising >= 1 and rising >= steps > 1:
        raise ValueError(f"warmup_steps={rising}: must be fewer than the {steps} steps, because the rate falls in the others. Lower it.")
    # half a step less, so that ceil(warmup * T) is that many steps whatever the rounding
    return _SCHEDULES[kind](warmup=rising if rising < 1 else (int(rising) - 0.5) / max(steps, int(rising)))


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _same(value: Any, taken: Any) -> bool:
    return type(value) is type(taken) and value == taken if isinstance(taken, (bool, type(None))) else _plain(value) == taken
