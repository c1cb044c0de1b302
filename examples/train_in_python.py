"""`samestep.train` from Python: the ranks are started from here, each with a copy of the task."""

from own_task import Spirals

import samestep

if __name__ == "__main__":  # the ranks import this file again
    recipe = samestep.Recipe(task=Spirals(), batch=64, epochs=10, optimizer=samestep.AdamW(lr=0.01))
    result = samestep.train(recipe, layout="dp2")
    print(f"accuracy {result.metrics['accuracy']:.3f} after {result.steps} steps")
    print("same step:", samestep.verify(recipe, layout="dp2").same_step)
