"""Checkpoints of other tools, and to them: a format a file, and a line each in `formats`.

Read `base` first: what weights and a format are. Then `convert` (one conversion from its source to its target),
and the formats: `dcp` (samestep's own, FSDP's), `torch_files` (state dicts, Accelerate's folders), `safetensors`,
`hugging_face`, `deepspeed`, `adapters` (PEFT's folders, and adapters merged into their base). `beside` compares an
exported model with the trained one, each as `published` builds it from its folder.

A conversion holds one tensor at a time: `Weights` reads by name, and formats write as they read. Pickles are
read by PyTorch's weights_only loader alone, with the few classes that a format names, so that no file runs code.
"""
