"""Other tools' configurations to job files, and back: a reader or a writer a file, a line each in `translation`.

Read `base` first (what readers and writers share), then `translation` (which format a file has, and the whole way),
then a format: `torchrun`, `accelerate`, `deepspeed` with `deepspeed_optimizer`, `sagemaker`. `unsaid`: what another
tool can't say, and why.
"""
