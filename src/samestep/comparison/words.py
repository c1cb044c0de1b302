"""A text in the two languages of the report."""

from typing import NamedTuple


class Words(NamedTuple):
    en: str
    zh: str

    def format(self, **values: object) -> "Words":
        return Words(self.en.format(**values), self.zh.format(**values))


LANGUAGES = Words._fields
