"""Pipeline parallel: a model cut into stages, which ranks run one after the other for many micro-batches."""
