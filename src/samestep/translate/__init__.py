"""Translates other tools' configurations to job files, and back.

Each format has a file with its reader and its writer, and an entry in the tables of `translation`. Read `base` first
(what readers and writers share), then `translation` (finds a file's format and runs reader and writer), then a
format: `torchrun`, `accelerate`, `deepspeed` with `deepspeed_optimizer`, `sagemaker`. `unsaid` lists the keys of a
job that other tools' configurations can't express, with the reasons.
"""
