"""DeepSpeed with ZeRO 3 and clipping.

verify: --engine deepspeed
"""

import torch
from pieces import Classifier, cross_entropy, deepspeed_on_cpus, loader, options, samples

given = options()
deepspeed = deepspeed_on_cpus()
torch.manual_seed(given.seed)
world = torch.distributed.get_world_size()
settings = {
    "train_batch_size": given.batch,
    "train_micro_batch_size_per_gpu": given.batch // world,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.5,
}
model = Classifier()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
batches = loader(samples(), given.batch)
for epoch in range(given.epochs):
    batches.sampler.set_epoch(epoch)
    for rows, classes in batches:
        loss = cross_entropy(engine(rows), classes)
        engine.backward(loss)
        engine.step()
