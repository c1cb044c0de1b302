"""python trainer_after.py"""

from small import bert, sentences, tell

import samestep

if __name__ == "__main__":
    recipe = samestep.Recipe(
        task=samestep.tasks.HuggingFace(model=bert(), data=sentences()),
        batch=32,
        epochs=10,
        optimizer=samestep.AdamW(lr=0.001, weight_decay=0.01),
        clip=1.0,
    )
    result = samestep.train(recipe, layout="dp2")
    tell(samestep.load_model(recipe, result.model_file))
