"""What the binding relies on in the Trainer beyond its documented interface."""

from __future__ import annotations

from lowbit_strategy.private_names import private_names

_TRAINER = "transformers.trainer:Trainer"

PATCHES = private_names(
    "transformers 5.23",
    f"""
    no callback is given the checkpoint that is resumed from, whose residuals have to be loaded, or comes before the \
    optimizer is made of the model's parameters
      wrapped {_TRAINER}.train(self, resume_from_checkpoint)
    scripts that run with a lowbit_config section make Trainers that know nothing of compression
      wrapped {_TRAINER}.__init__(self)
    a hyperparameter search makes an accelerator for each trial
      wrapped {_TRAINER}.create_accelerator_and_postprocess(self)
    it is read when the accelerator is made; attaching brings FSDP back where there is no GPU
      set {_TRAINER}.is_fsdp_enabled
    metrics of groups go to trackers and not to the console, which Trainer.log cannot separate
      read {_TRAINER}.callback_handler
    of replicas that come and go only the lowest one writes checkpoints
      wrapped {_TRAINER}._save_checkpoint(self, model, trial)
    a replica that joins takes over the others' step, and the mean of its losses is over its own steps
      set {_TRAINER}._globalstep_last_logged
    Accelerate forgets the FSDP plugin on CPU, and the arguments are all that is left of it
      read transformers.training_args:TrainingArguments.fsdp_plugin_args
    the one free-form part of trainer_state.json: it marks checkpoints that need residuals
      set transformers.trainer_callback:TrainerState.stateful_callbacks
    local steps: what is evaluated, saved and compared is what all ranks share; FSDP2: what was evaluated stays gathered
      wrapped {_TRAINER}.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)
      wrapped {_TRAINER}.predict(self, test_dataset, ignore_keys, metric_key_prefix)
      wrapped {_TRAINER}.save_model(self, output_dir, _internal_call)
      wrapped {_TRAINER}._load_best_model(self)
    """,
)
