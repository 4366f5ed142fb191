"""PrivateTrainer: the Trainer whose steps are those of `plan.private`; callbacks, evaluation, logging and saving are the Trainer's own.

    <output_dir>/ledger.jsonl          what each step is charged, on disk before its release               public
    <output_dir>/privacy.json          epsilon, noise receipt, plan: what `trainer.privacy` is             public, at the end
    <output_dir>/checkpoint-N/         the model and trainer_state.json, as the Trainer writes them        public
    <output_dir>-secret/checkpoint-N/  the run's state with its keys, mode 0600 in folders of mode 0700    SECRET

The model is not wrapped: no hook, no patched method; its trainable parameters become views into one vector.  Nothing that is logged or
saved outside the secret folder is computed from raw data: no training loss, no gradient norm, no realised batch size.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from fiberdp import _disk
from fiberdp._random import Keys
from fiberdp.accounting import Ledger
from fiberdp.checkpoint import FILE, load_checkpoint, restore, save_checkpoint, secret_folder, state_of
from fiberdp.integrations.transformers.arguments import PrivacyArguments, check_arguments, plan_of, secret_folder_of
from fiberdp.integrations.transformers.loss import per_example
from fiberdp.integrations.transformers.rows import by_length, check_padding, row_of, source_of
from fiberdp.planning import Plan
from fiberdp.record import differences, package_version, to_text, versions
from fiberdp.trainer import Run

try:
    import transformers
    from transformers import TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import SaveStrategy, TrainOutput, get_last_checkpoint, speed_metrics
except ImportError as error:
    raise ImportError(
        f"fiberdp.integrations.transformers needs transformers and accelerate ({error}). Run: pip install fiberdp[transformers]."
    ) from error
if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"fiberdp.integrations.transformers needs transformers 5, and {transformers.__version__} is installed: the Trainer's inside is "
        "another. Run: pip install 'transformers>=5'."
    )

STATE, LEDGER, PRIVACY = "trainer_state.json", "ledger.jsonl", "privacy.json"
STEPS_OF_TRAINER = (
    "compute_loss", "training_step", "get_train_dataloader", "_get_train_sampler", "get_batch_samples", "create_optimizer",
    "create_scheduler", "create_optimizer_and_scheduler", "_inner_training_loop", "_run_epoch",
)  # fmt: skip
"""What a subclass of Trainer may override to change a training step; here nothing would call it."""


class PrivateTrainer(transformers.Trainer):
    """`Trainer(...)` with one argument more, `privacy`; `train()` makes a private run, everything else works as before.

    A step is `Run.step` of `plan.private`: Poisson sampling over train_dataset with expected batch size per_device_train_batch_size *
    gradient_accumulation_steps, in memory per_device_train_batch_size at a time; per-example gradients of the model's own loss, clipped
    to clip_norm; noise; the method's filter and update.  The noise is proved before the first step (`ReceiptError`).

    Guarantee: everything that the trained model, the checkpoints, the log and the public files say of the rows of train_dataset is
    (epsilon, delta)-DP under the plan's relation.  Metrics on eval_dataset stand outside epsilon, and what is chosen by them (best
    checkpoint, early stopping) is private towards the training rows only.
    Raises ValueError, in one line and before anything is written, for arguments that cannot be honoured (see `arguments`), for a loss that
    cannot be had example by example, for rows or collators that draw random numbers or let examples meet through padding.
    `trainer.plan` is the plan, `trainer.run` the run, once there is one.
    """

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *positional: Any, privacy: PrivacyArguments, **named: Any
    ) -> None:
        args = args or TrainingArguments(output_dir="tmp_trainer")
        names = ("data_collator", "train_dataset", "eval_dataset")  # the next positions of Trainer
        given = dict(zip(names, positional)) | named
        check_arguments(args, privacy)
        self._check_overrides()
        if given.get("optimizers", (None, None)) != (None, None) or given.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError(
                "optimizers or optimizer_cls_and_kwargs: the update is the method's, because it knows a gradient's noise. Choose "
                "PrivacyArguments.method, and the rates in TrainingArguments."
            )
        rows, held_out = given.get("train_dataset"), given.get("eval_dataset")
        if rows is not None and any(rows is other for other in (held_out.values() if isinstance(held_out, dict) else (held_out,))):
            raise ValueError(
                "eval_dataset is train_dataset: metrics stand outside epsilon, so on training rows they would publish raw data. Hold rows "
                "out: train_dataset.train_test_split(test_size=...)."
            )
        self.privacy_args = privacy
        self.plan: Plan | None = plan_of(args, privacy, len(rows)) if isinstance(rows, Sized) else None
        self.run: Run | None = None
        self._chain = ""
        super().__init__(model, args, *positional, **named)

    @property
    def privacy(self) -> dict[str, Any]:
        """privacy.json as of now: JSON values, public.  ValueError before there is a run."""
        run = self.run
        if run is None:
            raise ValueError("trainer.privacy: there is no run yet, and nothing was released. Call train() first.")
        return {
            "method": run.plan.method.name,
            "keys": run.keys.kind,
            "privacy": run.statement() | ({"ledger_chain": self._chain} if self._chain else {}),
            "receipt": run.prove().to_json(),
            "clamp_mass": run.optimizer.clamp_mass(),
            "note": "eval_dataset is never trained on; its metrics, and what is chosen by them, stand outside epsilon",
            "engine": run.engine,
            "micro_batch_size": run.pipeline.micro_batch_size,
            "versions": versions() | {name: package_version(name) for name in ("transformers", "peft", "accelerate")},
            "config": self._config(),
        }

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """As Trainer.train.  One call a trainer: a second run has an epsilon of its own, which adds to the first's.

        resume_from_checkpoint: a checkpoint folder, or True for the last in output_dir; its secret half must be there.  The run continues
        bit for bit (on the CPU): steps that were charged after the checkpoint are taken again with the same batches and noise, and charged
        once.
        """
        check_arguments(self.args, self.privacy_args)
        if trial is not None:
            self.hyperparameter_search()
        out = self._out()
        if not resume_from_checkpoint and (out / LEDGER).exists():
            raise ValueError(
                f"{out} holds the ledger of a run: a new run needs a folder of its own, as mixing two runs' ledgers would falsify both. "
                "Choose another output_dir (their epsilons add up, if the rows are the same), or train(resume_from_checkpoint=True)."
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(out)) if out.is_dir() else None
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True: {out} holds no checkpoint, so there is nothing to go on from. Start without it, in a "
                    "new output_dir if a run was begun in this one."
                )
        if resume_from_checkpoint and not (Path(resume_from_checkpoint) / STATE).is_file():
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: there is no {STATE} in it, and a run continues from a whole one "
                "only. Give a checkpoint-N folder of output_dir, or True for the last."
            )
        return super().train(resume_from_checkpoint=resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **named: Any) -> Any:
        """Refused: every trial is a run on the same rows, and their epsilons add up."""
        raise ValueError(
            "hyperparameter_search: every trial would be a private run on the same rows, and their epsilons add up beyond what one says. "
            "Tune on rows that need no protection, with a PrivateTrainer a trial."
        )

    # ---- the loop ----

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        with ExitStack() as held:
            run = self._begin(resume_from_checkpoint, held)
            return self._train(run, resume_from_checkpoint, ignore_keys_for_eval)

    def _begin(self, checkpoint: str | None, held: ExitStack) -> Run:
        """The run, proved, its ledger open; or as it was at the checkpoint.  Until the ledger is opened, nothing is written."""
        if self.accelerator.num_processes > 1 or self.model_wrapped is not self.model:
            raise ValueError(
                "the model is wrapped, or there are several processes: a private step needs the model itself, in one process. Start the "
                "script with python, not with a launcher of several processes."
            )
        tensors, state = self._saved(checkpoint) if checkpoint else ({}, {})
        dataset, collate = self._training_rows()
        source = source_of(dataset, collate)
        self.plan = plan_of(self.args, self.privacy_args, len(source))
        if state:
            for where, old, new in differences(state["config"], json.loads(json.dumps(self._config()))):
                raise ValueError(
                    f"resume_from_checkpoint with {where}={new}, but the run was started with {old}: the plan must be the same, because "
                    "epsilon was calibrated for it. Repeat the arguments of the first call."
                )
        model: Any = self.model
        model.train()
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                raise ValueError(
                    f"layer {name} is {type(layer).__name__}: a Trainer trains every layer in training mode, where the statistics of a "
                    "batch mix its examples. Use GroupNorm, or give the model a train() that leaves these layers in eval mode."
                )
        loss_fn = per_example(model, row_of(source), smoothing=self.args.label_smoothing_factor, own=self.compute_loss_func)
        check_padding(model, loss_fn, source)
        seed = self.privacy_args.seed
        run = self.plan.private(
            model,
            loss_fn,
            source,
            keys=Keys.from_json(state["keys"]) if state else Keys.secret() if seed is None else Keys.seeded(seed),
            engine=state["engine"] if state else self.privacy_args.engine,
            precision="bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "float32",
            micro_batch_size=self.args.per_device_train_batch_size,
        )
        run.prove()
        run.ahead = False  # a callback may stop it
        out = self._out()
        _disk.make_folder(out)
        run.ledger = held.enter_context(Ledger(out / LEDGER, self.plan.terms))
        if state:
            restore(run, tensors, state)
        self.run = run
        return run

    def _train(self, run: Run, checkpoint: str | None, ignore_keys: list[str] | None) -> TrainOutput:
        args, steps, per_epoch = self.args, run.plan.steps, run.plan.sampler.steps_per_epoch
        self.state = self._state(checkpoint, steps)
        self.state.init_training_references(self, steps, math.ceil(steps / per_epoch), None)
        first = self.state.global_step
        handler: Any = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler, handler.train_dataloader = self.model, None, None, None
        started, self._last_logged = time.time(), first

        def released(_: Any) -> None:
            self.control = handler.on_pre_optimizer_step(args, self.state, self.control)

        run.heard = released
        self.control = handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(None, ignore_keys, skip_scheduler=True)
        lr = run.optimizer.lr
        for epoch in range(first // per_epoch, math.ceil(steps / per_epoch)):
            self.control = handler.on_epoch_begin(args, self.state, self.control)
            for step in range(max(first, epoch * per_epoch), min(steps, (epoch + 1) * per_epoch)):
                self.control = handler.on_step_begin(args, self.state, self.control)
                self.model.train()  # pyright: ignore[reportOptionalMemberAccess]  (an evaluation left it in eval mode)
                lr = run.step().lr
                self.control = handler.on_optimizer_step(args, self.state, self.control)
                self.state.global_step += 1
                self.state.epoch = (step + 1) / per_epoch
                self.control = handler.on_step_end(args, self.state, self.control)
                self._log_evaluate_save(lr, ignore_keys)
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            self.control = handler.on_epoch_end(args, self.state, self.control)
            self._log_evaluate_save(lr, ignore_keys)
            if self.control.should_training_stop:
                break
        run.heard = None
        return self._finish(run, started, self.state.global_step - first)

    def _log_evaluate_save(self, lr: float, ignore_keys: list[str] | None) -> None:
        """What the flow callbacks asked for; of a step, its rate and epsilon so far are public, and nothing else."""
        if self.control.should_log and self.state.global_step > self._last_logged:
            self._last_logged = self.state.global_step
            self.log({"learning_rate": lr, "epsilon": self._run.epsilon})
        if self.control.should_evaluate:
            metrics = self._evaluate(None, ignore_keys)
            best = self._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = best
        if self.control.should_save:
            self._save_checkpoint(self.model, None)  # pyright: ignore[reportArgumentType]
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _finish(self, run: Run, started: float, taken: int) -> TrainOutput:
        self._chain = run.ledger.finish()
        metrics = speed_metrics("train", started, num_samples=taken * run.plan.batch_size, num_steps=taken)
        said = run.statement()
        metrics |= {name: said[name] for name in ("epsilon", "delta", "noise_multiplier")}
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        _disk.write_atomically(self._out() / PRIVACY, to_text(self.privacy))
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self._finish_current_push()
        self.is_in_train = False
        return TrainOutput(self.state.global_step, math.nan, metrics)

    def _state(self, checkpoint: str | None, steps: int) -> TrainerState:
        if checkpoint:
            state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
            if state.global_step != self._run.optimizer.t:
                raise ValueError(
                    f"{checkpoint}: its {STATE} is at step {state.global_step}, its secret half at {self._run.optimizer.t}: both must be "
                    "of one moment. Resume from another checkpoint."
                )
            self.state = state
            self._load_callback_state()
            return state
        state = TrainerState(
            stateful_callbacks=[  # pyright: ignore[reportArgumentType]  (it says TrainerCallback, and takes these)
                one for one in (*self.callback_handler.callbacks, self.control) if isinstance(one, ExportableState)
            ]
        )
        state.train_batch_size = self.args.train_batch_size
        state.compute_steps(self.args, steps)
        return state

    # ---- rows ----

    def _training_rows(self) -> tuple[Any, Any]:
        """The rows and the collator, without the columns that the model does not take; as the Trainer's data loader has them."""
        dataset: Any = self.train_dataset
        if dataset is None:
            raise ValueError("train() without train_dataset: there is nothing to train on. Give it to PrivateTrainer.")
        lengths, name = None, self.args.length_column_name
        columns = getattr(dataset, "column_names", None) or []
        if self.args.train_sampling_strategy == "group_by_length" and name in columns:
            lengths = list(dataset[name])
        collate: Any = self.data_collator
        if isinstance(columns, list) and columns and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        if self.args.train_sampling_strategy == "group_by_length":
            dataset = by_length(dataset, lengths, getattr(self.processing_class, "model_input_names", ["input_ids"])[0])
        return dataset, collate

    # ---- checkpoints ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer's, with the run's state in the secret folder; of checkpoints that were rotated away, that goes as well."""
        super()._save_checkpoint(model, trial)
        kept = {path.name for path in self._out().glob("checkpoint-*")}
        for secret in self._secret().glob("checkpoint-*"):
            if secret.name not in kept and (secret / FILE).is_file():
                shutil.rmtree(secret)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        tensors, state = state_of(self._run)
        secret_folder(self._secret())
        save_checkpoint(self._secret() / Path(output_dir).name, tensors, state | {"config": self._config()})

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: every random number is addressed by key, stream and step."""

    def _save_scaler(self, output_dir: str) -> None:
        """Nothing: there is no loss scaling."""

    def _saved(self, checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
        folder = self._secret() / Path(checkpoint).resolve().name
        if not (folder / FILE).is_file():
            raise ValueError(
                f"{folder / FILE} does not exist: a resume needs the checkpoint's secret half, which holds the run's keys, and "
                "save_only_model leaves out. Restore it, name its folder in PrivacyArguments.secret_dir, or start in a new output_dir."
            )
        return load_checkpoint(folder)

    def _out(self) -> Path:
        return Path(str(self.args.output_dir))

    def _secret(self) -> Path:
        return secret_folder_of(self.args, self.privacy_args)

    def _config(self) -> dict[str, Any]:
        """What a resumed run must repeat."""
        assert self.plan is not None
        return {
            "plan": self.plan.to_json(),
            "seed": self.privacy_args.seed,
            "engine": self.privacy_args.engine,
            "bf16": self.args.bf16,
            "fp16": self.args.fp16,
            "per_device_train_batch_size": self.args.per_device_train_batch_size,
            "train_sampling_strategy": str(getattr(self.args.train_sampling_strategy, "value", self.args.train_sampling_strategy)),
            "label_smoothing_factor": self.args.label_smoothing_factor,
        }

    # ---- what the Trainer would do otherwise ----

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        """Without mixed precision: the Accelerator would patch the model's forward; half precision is the engine's."""
        return super()._build_accelerator_args(**named) | {"mixed_precision": "no"}

    @property
    def _run(self) -> Run:
        assert self.run is not None
        return self.run

    def _check_overrides(self) -> None:
        for name in STEPS_OF_TRAINER:
            ours = getattr(PrivateTrainer, name, None)
            if ours is not None and getattr(type(self), name) is not ours:
                raise ValueError(
                    f"{type(self).__name__}.{name}: a private step does not call it, and what is overridden there would not happen. Give "
                    "compute_loss_func (one loss per example), PrivacyArguments.method or a data set of your own instead."
                )
