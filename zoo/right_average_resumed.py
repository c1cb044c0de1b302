"""A resumed run goes on with the average of its weights.

verify: --script="--stop 2" --then="--resume" --alone=""
"""

import torch
from pieces import Classifier, cross_entropy, join, loader, options, replicated, samples
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

given = options()
rank, world = join(given.seed)
net = Classifier()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
done = 0
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
if given.resume:
    state = torch.load(given.saved)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    average.load_state_dict(state["average"])
    done = state["done"]
model = replicated(net)
for step, (rows, classes) in enumerate(loader(samples(), given.batch, shuffle=False)):
    if step < done:
        continue
    optimizer.zero_grad()
    cross_entropy(model(rows), classes).backward()
    optimizer.step()
    average.update_parameters(net)
    if step + 1 == given.stop:
        if rank == 0:
            state = {"model": net.state_dict(), "average": average.state_dict(), "done": step + 1}
            torch.save({**state, "optimizer": optimizer.state_dict()}, given.saved)
        break
