"""Methods that send less than plain data parallelism: one file and one line here each.

Read `base` first: what a method is given, when it is called, what it leaves in a checkpoint. `wire` holds the
collectives, which count what they send; `few_bits` and `one_bit` send numbers in fewer bits, and `adam_state` reads
and writes AdamW's state for methods that take its step. The methods: `half` (16-bit messages), `powersgd`,
`one_bit_adam` and `zero_one_adam` send gradients or momentum in fewer bytes; `local_sgd` and `diloco` average weights
every few steps. `engines/native/less_communication.py` calls them.
"""

METHODS = {
    "bf16": "samestep.comm.compression.half:Half",
    "diloco": "samestep.comm.compression.diloco:OuterMomentum",
    "fp16": "samestep.comm.compression.half:Half",
    "local-sgd": "samestep.comm.compression.local_sgd:Averaging",
    "one-bit-adam": "samestep.comm.compression.one_bit_adam:OneBitMomentum",
    "powersgd": "samestep.comm.compression.powersgd:LowRank",
    "zero-one-adam": "samestep.comm.compression.zero_one_adam:LocalOneBit",
}
