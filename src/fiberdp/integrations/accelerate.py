"""A private run for those who have a loop of their own around an `Accelerator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from fiberdp.engines import LossFn
    from fiberdp.planning import Plan
    from fiberdp.trainer import Run

_PRECISIONS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}


def private(accelerator: Accelerator, plan: Plan, model: nn.Module, loss_fn: LossFn, dataset: Any, **options: Any) -> Run:
    """`plan.private` on the Accelerator's device and in its precision, with the model itself: what `prepare` put around it is taken off.

    model: prepared or not.  dataset: the data set itself, because the plan's sampler draws the batches.  options: of `plan.private`.

    Guarantee: that of `fiberdp.trainer.Run`.  The run's model is `accelerator.unwrap_model(model)`, its forward as it was written.
    Raises ValueError, in one line, for several processes, for a wrapper that shards or copies the model, for fp8, for
    gradient accumulation by the Accelerator; and for what `plan.private` refuses.
    """
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if accelerator.num_processes > 1 or kind != "NO":
        raise ValueError(
            f"Accelerator with {accelerator.num_processes} processes, {kind}: a private run has one process and the model itself, because "
            "each process would draw noise of its own. Start the script with python, without FSDP, DeepSpeed or several processes."
        )
    if accelerator.mixed_precision not in _PRECISIONS:
        raise ValueError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}): must be one of {', '.join(_PRECISIONS)}, because the "
            "engines run in no other. Use 'bf16'."
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}): nothing would read it, because a step is "
            "one release. Leave it out, put the whole batch into the plan's batch_size, and bound memory by micro_batch_size."
        )
    if "precision" in options:
        raise ValueError("precision: it is the Accelerator's mixed_precision, because one setting has one place. Leave it out here.")
    own: Any = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if getattr(vars(own).get("forward"), "__func__", None) is type(own).forward:
        del own.forward  # put back on the object, where it hides the class's
    own.to(accelerator.device)
    return plan.private(own, loss_fn, dataset, precision=_PRECISIONS[accelerator.mixed_precision], **options)
