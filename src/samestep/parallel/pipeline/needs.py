"""Needs: what each call of a unit takes that other calls have given, and which parameters are used between them."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samestep.parallel.calls import Trace
from samestep.parallel.pipeline.units import UnitCall


@dataclass(frozen=True, kw_only=True)
class Given:
    """A tensor of what a unit's call gives."""

    caller: int  # the number of the call among those of all units
    number: int  # of the tensor among those of the call's output
    changed: bool  # whether its memory is written to afterwards

    def place(self) -> tuple[int, int]:
        """What to sort by."""
        return self.caller, self.number


@dataclass(frozen=True, kw_only=True)
class Need:
    """What has to be known to compute something, not looking behind what units' calls give."""

    given: frozenset[Given] = frozenset()
    parameters: frozenset[str] = frozenset()  # read outside of all other calls
    hidden: frozenset[int] = frozenset()  # calls of which something is read that they do not give

    def __or__(self, other: "Need") -> "Need":
        return Need(
            given=self.given | other.given,
            parameters=self.parameters | other.parameters,
            hidden=self.hidden | other.hidden,
        )


_NOTHING = Need()


class Needs:
    """Looked up in a traced forward's dataflow."""

    def __init__(self, trace: Trace, calls: Sequence[UnitCall]) -> None:
        self._nodes = trace.dataflow.nodes
        self._changed = trace.dataflow.changed
        self._calls = calls
        self._began = [each.call.began for each in calls]
        self._of_output = {began: number for number, began in enumerate(self._began)}
        self._known: dict[int, Need] = {}
        self.of_calls = self._of_each_call()
        # What a unit keeps to itself and the model gives as it is, such as a cache, no loss is computed from.
        self.of_output = self._all(number for number in trace.dataflow.results if not self._is_hidden(number))

    def _of_each_call(self) -> list[Need]:
        """Of every call of a unit. Parameters that it reads itself are among them."""
        found = [_NOTHING] * len(self._calls)
        for number, node in enumerate(self._nodes):
            caller = self._caller(number)
            if caller is None:
                continue
            for parent in node.parents:
                if self._caller(parent) != caller:
                    found[caller] |= self._need(parent)
        return found

    def _caller(self, number: int) -> int | None:
        """The call in which a node was computed, or whose output it is; None for what stands between the calls."""
        node = self._nodes[number]
        if node.output is not None and node.output[0] in self._of_output:
            return self._of_output[node.output[0]]
        at = bisect_right(self._began, node.time) - 1
        return at if at >= 0 and node.time < self._calls[at].call.ended and not node.parameter else None

    def _is_hidden(self, number: int) -> bool:
        node = self._nodes[number]
        if node.output is not None and node.output[0] not in self._of_output and self._caller(number) is None:
            return all(self._is_hidden(parent) for parent in node.parents)
        answer = self._answer(number)
        return answer is not None and bool(answer.hidden)

    def _all(self, numbers: Iterable[int]) -> Need:
        found = _NOTHING
        for number in numbers:
            found |= self._need(number)
        return found

    def _need(self, number: int) -> Need:
        waiting = [number]
        while waiting:
            node = waiting[-1]
            if node in self._known:
                waiting.pop()
                continue
            answer = self._answer(node)
            missing = [] if answer is not None else [p for p in self._nodes[node].parents if p not in self._known]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if answer is None:
                answer = _NOTHING
                for parent in self._nodes[node].parents:
                    answer |= self._known[parent]
            self._known[node] = answer
        return self._known[number]

    def _answer(self, number: int) -> Need | None:
        """Where a search ends: at what a call gives, at a parameter; None where it goes on."""
        node = self._nodes[number]
        if node.parameter is not None:
            return Need(parameters=frozenset({node.parameter}))
        caller = self._caller(number)
        if caller is None:
            return None
        if node.output is not None and node.output[0] == self._began[caller]:
            given = Given(caller=caller, number=node.output[1], changed=number in self._changed)
            return Need(given=frozenset({given}))
        return Need(hidden=frozenset({caller}))
