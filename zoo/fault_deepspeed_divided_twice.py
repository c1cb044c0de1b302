"""The script divides the loss by its micro-batches, and so does DeepSpeed's backward.

report: deepspeedai/DeepSpeed #7439
kind: accumulation-divisor
verify: --engine deepspeed --script "--batch 8 --accumulate 4" --alone "--batch 32 --accumulate 1"
"""

import torch
from pieces import Classifier, cross_entropy, deepspeed_on_cpus, loader, options, samples

given = options()
deepspeed = deepspeed_on_cpus()
torch.manual_seed(given.seed)
world = torch.distributed.get_world_size()
settings = {
    "train_micro_batch_size_per_gpu": given.batch // world,
    "gradient_accumulation_steps": given.accumulate,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
model = Classifier()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
batches = loader(samples(), given.batch, shuffle=False)
for _ in range(given.epochs):
    for rows, classes in batches:
        engine.backward(cross_entropy(engine(rows), classes) / given.accumulate)
        engine.step()
