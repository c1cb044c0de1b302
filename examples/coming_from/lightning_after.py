"""python lightning_after.py"""

from small import loss, net, points, tell

import samestep


class Points(samestep.Task):
    def model(self):
        return net()

    def train_set(self):
        return points()

    def loss(self, output, batch):
        return loss(output, batch.targets) * len(output), len(output)


if __name__ == "__main__":
    recipe = samestep.Recipe(
        task=Points(),
        batch=32,
        epochs=10,
        optimizer=samestep.AdamW(lr=0.01, weight_decay=0.01, decay_all=True),
        clip=1.0,
    )
    result = samestep.train(recipe, layout="dp2")
    tell(samestep.load_model(recipe, result.model_file))
