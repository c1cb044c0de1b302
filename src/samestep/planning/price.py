"""The cost of tokens: from a device's price and power, and the tokens of a step."""

import re
from dataclasses import dataclass
from typing import Any

from samestep.errors import UserError
from samestep.planning.hardware import ClusterSpec
from samestep.planning.stage_time import PlannedJob

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]{3}|[$€¥])\s*/\s*(hour|hr|h|day|month)\s*")
_HOURS = {"hour": 1.0, "hr": 1.0, "h": 1.0, "day": 24.0, "month": 730.0}
_CURRENCIES = {"$": "USD", "€": "EUR", "¥": "CNY"}


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device for one hour."""

    amount: float
    currency: str

    @classmethod
    def parse(cls, text: str) -> "Price":
        """Read a price such as "2.5 USD/hour". Raises UserError for one without a currency or a unit of time."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UserError(
                f'--price is "{text}"; give a number, a currency and a time of one device, such as "2.5 USD/hour" '
                "(also /day, /month)"
            )
        currency = _CURRENCIES.get(match[2], match[2].upper())
        return cls(amount=float(match[1]) / _HOURS[match[3]], currency=currency)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a million tokens on a cluster."""

    kilowatt_hours: float  # of the device boards at their rated power, without hosts, network and cooling
    money: float | None
    currency: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "kilowatt_hours_per_million_tokens": self.kilowatt_hours,
            "price_per_million_tokens": self.money,
            "currency": self.currency,
        }


def cost_of(job: PlannedJob, cluster: ClusterSpec, step_seconds: float, price: Price | None) -> Cost:
    """Compute the cost of a million tokens from the time of a step.

    Device-hours per million tokens are devices * seconds per step / 3600 / (tokens per step / 10^6). Energy is these
    hours times the device's watts, in kWh; money is these hours times the price of a device-hour.
    """
    hours = cluster.devices * step_seconds / 3600 / (job.tokens / 1e6)
    return Cost(
        kilowatt_hours=hours * cluster.device.watts / 1e3,
        money=price.amount * hours if price else None,
        currency=price.currency if price else None,
    )
