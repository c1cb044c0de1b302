"""The loop around the step: optimizers and schedules, evaluation, progress, records."""
