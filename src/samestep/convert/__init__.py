"""Checkpoints of other tools, and to them: a format a file, and a line each in `formats`.

Read `base` first: what weights and a format are. Then `convert` (one conversion from its source to its target),
and the formats: `dcp` (samestep's own, FSDP's), `torch_files` (state dicts, Accelerate's folders), `safetensors`,
`hugging_face`, `deepspeed`, `adapters` (PEFT's folders, and adapters merged into their base).
"""
