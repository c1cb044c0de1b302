"""Who takes the step: one file and one line here each."""

ENGINES = {
    "native": "samestep.engines.native:Native",
}
