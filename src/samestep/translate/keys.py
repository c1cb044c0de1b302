"""Keys: a section of another tool's configuration, read key by key, so that none is passed over in silence."""

from collections.abc import Collection, Mapping
from typing import Any

from samestep.errors import UserError
from samestep.translate.draft import Draft
from samestep.validation import closest, shown

# What transformers' Trainer and accelerate fill in from their own arguments.
AUTO = "auto"
_SWITCHES = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


class Keys:
    """A section, where it stands, and which of its keys have been taken."""

    def __init__(self, values: Any, draft: Draft, place: str = "") -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"{place or 'the file'} is {shown(values)}; it should be a section of keys and values")
        self._values = {str(key): value for key, value in values.items() if value is not None}
        self._left = dict(self._values)
        self._draft = draft
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def place(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key

    def take(self, key: str) -> Any:
        """The value as it stands; None where there is none, and with a remark where it is left to be filled in."""
        value = self._left.pop(key, self._values.get(key))
        if value == AUTO:
            self._draft.remark(self.place(key), AUTO, "filled in by the script's own arguments; write their value")
            return None
        return value

    def whole(self, key: str, least: int = 1) -> int | None:
        value = self.take(key)
        number = _number(value)
        if value is None:
            return None
        if number is None or number != int(number) or number < least:
            raise self._wrong(key, value, f"a whole number of {least} or more")
        return int(number)

    def number(self, key: str, least: float = 0.0) -> float | None:
        value = self.take(key)
        number = _number(value)
        if value is not None and (number is None or number < least):
            raise self._wrong(key, value, f"a number of {least:g} or more")
        return number

    def switch(self, key: str) -> bool | None:
        value = self.take(key)
        if value is None:
            return None
        found = _SWITCHES.get(str(value).lower())
        if found is None:
            raise self._wrong(key, value, "true or false")
        return found

    def word(self, key: str, choices: Collection[str]) -> str | None:
        """One of several words, whatever its case: as it stands in `choices`."""
        value = self.take(key)
        if value is None:
            return None
        for choice in choices:
            if str(value).lower() == choice.lower():
                return choice
        raise UserError(f"{self.place(key)} is {shown(value)}; {closest(str(value), choices)}")

    def section(self, key: str) -> "Keys":
        """A section of this one; an empty one where there is none."""
        value = self._left.pop(key, {})
        return Keys({} if value is None else value, self._draft, self.place(key))

    def enabled(self, key: str) -> "Keys":
        """A section that has a switch `enabled`; an empty one, with a remark, where it is off."""
        section = self.section(key)
        if section and not section.switch("enabled"):
            self._draft.remark(self.place(key), None, "not enabled")
            return Keys({}, self._draft, self.place(key))
        return section

    def remark(self, key: str, why: str) -> None:
        """Take a key that has no counterpart, and say why."""
        if key in self._values:
            self._left.pop(key, None)
            self._draft.remark(self.place(key), self._values[key], why)

    def leave(self, reasons: Mapping[str, str], otherwise: str) -> None:
        """A remark for each key that nobody has taken."""
        for key in list(self._left):
            self.remark(key, reasons.get(key, otherwise))

    def _wrong(self, key: str, value: Any, wanted: str) -> UserError:
        return UserError(f"{self.place(key)} is {shown(value)}; it should be {wanted}")


def _number(value: Any) -> float | None:
    """A number, also one that stands in quotes, as YAML reads 1e-5 and as such files often have it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if abs(number) != float("inf") and number == number else None
