"""The report: one page of HTML in English and Chinese, which opens from disk and needs no network."""
