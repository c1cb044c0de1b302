"""Checkpoints of other tools, and to them: a format a file, and a line each in `formats`.

Read `base` first: what weights and a format are. Then `convert` (one conversion from its source to its target),
and the formats: `own`, `safetensors`, `state_dict`, `hugging_face`, `deepspeed`, `fsdp`, `accelerate_folder`,
`peft_folder`. `inspect` tells what a file holds, `pickles` reads files of torch.save without running them;
`merge` puts adapters into their base.
"""
