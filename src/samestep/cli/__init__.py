"""The command line: one thin file a command, which parses its options and calls a function of the package.

`main` finds the command and turns errors into one message and an exit code. `job_options` and `launch_options`
declare what several commands have, as does `samestep.output_files`; `hyperparameters` are SageMaker's, `suggestions`
what a mistyped word may have meant, and `next_command` what to type after a training.

- To begin: `init`, `schema`, `check`. To train: `train`, `launch`, `evaluate`, `predict`, `chat`, `checkpoint`.
- To prove and compare: `verify` (`verify_script` for `--script`, `verify_against` for `--against`), `compare`,
  `drill`.
- To choose: `layout`, `plan` (`plan_job` for a job file), `tune`, `comm`. To look around: `data`, `hosts`,
  `doctor`, `translate`.

Arguments are argparse's: `samestep --help` takes 0.1 s, and importing click or typer alone would take longer.
"""
