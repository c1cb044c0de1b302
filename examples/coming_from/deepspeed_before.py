"""torchrun --standalone --nproc-per-node=2 deepspeed_before.py"""

from pathlib import Path

import deepspeed
from small import loss, net, points, tell
from torch.utils.data import DataLoader, DistributedSampler

deepspeed.init_distributed()
model = net()
parameters = model.parameters()
config = str(Path(__file__).with_name("ds_config.json"))
engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
sampler = DistributedSampler(points())
loader = DataLoader(points(), batch_size=16, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        engine.backward(loss(engine(inputs), targets))
        engine.step()
tell(engine.module)
