"""Which sample is trained on when, how samples reach a rank, and the texts and images that ship with samestep.

Read `order` first (which samples make a global batch, and which of them a rank takes: no layout changes it), then
`loader` (a rank's micro-batches) and `sample_draws`, which seeds what a data set draws. `types` has `Samples` and
`Batch`, which tasks give, `nests` goes through the tensors in batches, arguments and outputs. `split`, `cache` and
`tokenizer` prepare data; `text`, `images` and `corpus` read files and have the tables of sources; `records` reads
rows of any kind, `conversations` makes tokens of them, and `packing` samples. `bundled` reads the sources that
installed packages bring, which `package_files` finds. `fingerprint` tells one data set from another, by hashes of
`canonical`, and `source_files` the files that they come from.

The way of a sample: its number stands in `SampleOrder.global_batch(step)`; `order.cut` gives it to one rank and
micro-batch; the loader reads it by its number, `Task.collate` makes tensors of the micro-batch, and these go to
the device. The numbers and the seed travel along as a `Moment`, so that dropout and batch norm know whose samples a
forward has.
"""
