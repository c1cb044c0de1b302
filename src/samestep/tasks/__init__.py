"""The tasks that ship with samestep: one file and one line here each."""

TASKS = {
    "causal-lm": "samestep.tasks.causal_lm:CausalLM",
    "image-classification": "samestep.tasks.image_classification:ImageClassification",
    "regression": "samestep.tasks.regression:Regression",
    "text-classification": "samestep.tasks.text_classification:TextClassification",
}
