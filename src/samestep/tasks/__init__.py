"""The tasks that ship with samestep: one file and one line here each."""

TASKS = {
    "regression": "samestep.tasks.regression:Regression",
    "text-classification": "samestep.tasks.text_classification:TextClassification",
}
