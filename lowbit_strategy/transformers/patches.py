"""What the binding relies on in the Trainer beyond its documented interface."""

from __future__ import annotations

from lowbit_strategy.private_names import PrivateName

_SEEN = "transformers 5.23"
_TRAINER = "transformers.trainer:Trainer"

PATCHES = (
    PrivateName(
        target=f"{_TRAINER}.train",
        use="wrapped",
        parameters=("self", "resume_from_checkpoint"),
        seen=_SEEN,
        reason="no callback is given the checkpoint that is resumed from, whose residuals have to be loaded, or comes"
        " before the optimizer is made of the model's parameters",
    ),
    PrivateName(
        target=f"{_TRAINER}.__init__",
        use="wrapped",
        parameters=("self",),
        seen=_SEEN,
        reason="scripts under lowbit launch make Trainers that know nothing of compression",
    ),
    PrivateName(
        target=f"{_TRAINER}.create_accelerator_and_postprocess",
        use="wrapped",
        parameters=("self",),
        seen=_SEEN,
        reason="a hyperparameter search makes an accelerator for each trial",
    ),
    PrivateName(
        target=f"{_TRAINER}.is_fsdp_enabled",
        use="set",
        seen=_SEEN,
        reason="it is read when the accelerator is made; attaching brings FSDP back where there is no GPU",
    ),
    PrivateName(
        target=f"{_TRAINER}.callback_handler",
        use="read",
        seen=_SEEN,
        reason="metrics of groups go to trackers and not to the console, which Trainer.log cannot separate",
    ),
    *PrivateName.each(
        _TRAINER,
        {"_save_checkpoint": ("self", "model", "trial")},
        use="wrapped",
        seen=_SEEN,
        reason="of replicas that come and go only the lowest one writes checkpoints",
    ),
    PrivateName(
        target=f"{_TRAINER}._globalstep_last_logged",
        use="set",
        seen=_SEEN,
        reason="a replica that joins takes over the others' step, and the mean of its losses is over its own steps",
    ),
    PrivateName(
        target="transformers.training_args:TrainingArguments.fsdp_plugin_args",
        use="read",
        seen=_SEEN,
        reason="Accelerate forgets the FSDP plugin on CPU, and the arguments are all that is left of it",
    ),
    PrivateName(
        target="transformers.trainer_callback:TrainerState.stateful_callbacks",
        use="set",
        seen=_SEEN,
        reason="the one free-form part of trainer_state.json: it marks checkpoints that need residuals",
    ),
    *PrivateName.each(
        _TRAINER,
        {
            "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
            "predict": ("self", "test_dataset", "ignore_keys", "metric_key_prefix"),
            "save_model": ("self", "output_dir", "_internal_call"),
            "_load_best_model": ("self",),
        },
        use="wrapped",
        seen=_SEEN,
        reason="local steps: what is evaluated, saved and compared is what all ranks share; FSDP2: what was"
        " evaluated stays gathered",
    ),
)
