"""The report: one page of HTML in English and Chinese, which opens from disk and needs no network.

`page` puts it together from tables and the figures of `plots`. `verify --script` makes its page of the same parts.
"""
