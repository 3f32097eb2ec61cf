"""A parser for a part of PromQL: it finds the metrics that a query reads, and the labels of the query's result."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

TARGET_LABELS: Final = frozenset({"fleet", "job", "instance"})
"""Labels that Prometheus adds to every target, see deploy/prometheus/prometheus.yml."""
TOKEN: Final = re.compile(
    r"""\s*(?:
    (?P<duration>(?:\d+(?:ms|[smhdwy]))+)|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<op>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],@])|(?P<end>$)
    )""",
    re.VERBOSE,
)
PRECEDENCE: Final = {
    "or": 1, "and": 2, "unless": 2, "==": 3, "!=": 3, "<": 3, "<=": 3, ">": 3, ">=": 3, "+": 4, "-": 4, "*": 5, "/": 5,
    "%": 5, "^": 6,
}  # fmt: skip
SETS: Final = frozenset({"and", "or", "unless"})
MATCHERS: Final = frozenset({"=", "!=", "=~", "!~"})
AGGREGATIONS: Final = frozenset({"sum", "min", "max", "avg", "count", "topk", "bottomk", "count_values", "quantile"})
FUNCTIONS: Final = frozenset({
    "rate", "increase", "delta", "changes", "resets", "clamp_min", "clamp_max", "histogram_quantile", "label_replace",
    "avg_over_time", "max_over_time", "min_over_time", "last_over_time", "time", "timestamp", "vector",
})  # fmt: skip

T = TypeVar("T")
Catalogue = Mapping[str, frozenset[str]]
"""The labels of each metric, including those of the target."""
Labels = frozenset[str] | None
"""The labels of a value. None stands for a number or a string, which has no labels."""


class QueryError(ValueError):
    """A query that is invalid PromQL or uses a metric or label that does not exist."""


@dataclass
class Query:
    """The labels and selectors of a query."""

    labels: Labels = None
    """Labels of the query's result."""
    selectors: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Each metric with the requested value of each label, without the operator."""


def read(text: str, catalogue: Catalogue) -> Query:
    """Parse a query against the existing metrics.

    Raises:
        QueryError: the query is invalid, or uses a metric or label that does not exist; the message names it.
    """
    reader = _Reader(text, catalogue)
    reader.query.labels = reader.expression(0)
    reader.take("")
    return reader.query


class _Reader:
    """A recursive descent parser: each method parses one form and returns the labels of its value."""

    def __init__(self, text: str, catalogue: Catalogue) -> None:
        self._text, self._catalogue = text, catalogue
        self._at = 0
        self.query = Query()
        self._next()

    def _next(self) -> None:
        match = TOKEN.match(self._text, self._at)
        if match is None:
            self._fail(f"cannot read {self._text[self._at :][:20]!r}")
        self._kind, self._token, self._at = match.lastgroup, match[match.lastgroup or ""], match.end()

    def _fail(self, why: str) -> NoReturn:
        raise QueryError(f"{why} in {self._text!r}")

    def take(self, token: str) -> None:
        """Consume this token; "" is the end."""
        if self._token != token:
            self._fail(f"{self._token!r} where {token or 'the end'!r} is expected")
        if token:
            self._next()

    def _value(self, *kinds: str) -> str:
        if self._kind not in kinds:
            self._fail(f"{self._token!r} where one of {kinds} is expected")
        token = self._token
        self._next()
        return token

    def _list(self, opening: str, closing: str, item: Callable[[], T]) -> list[T]:
        items = []
        self.take(opening)
        while self._token != closing:
            items.append(item())
            if self._token != closing:
                self.take(",")
        self.take(closing)
        return items

    def expression(self, at_least: int) -> Labels:
        """Parse operands and the operators between them whose precedence is at least `at_least`."""
        if self._token == "-":
            self._next()
        left = self._operand()
        while (strength := PRECEDENCE.get(self._token, -1)) >= max(at_least, 1):
            operator = self._value("op", "name")
            if self._token == "bool":
                self._next()
            matching, names, more = self._matching()
            left = self._joined(operator, left, self.expression(strength + 1), matching, names, more)
        return left

    def _matching(self) -> tuple[str, frozenset[str], frozenset[str]]:
        if self._token not in {"on", "ignoring"}:
            return "", frozenset(), frozenset()
        matching, more = self._value("name"), frozenset[str]()
        names = frozenset(self._list("(", ")", lambda: self._value("name")))
        if self._token in {"group_left", "group_right"}:
            self._next()
            more = frozenset(self._list("(", ")", lambda: self._value("name"))) if self._token == "(" else more
        return matching, names, more

    def _joined(
        self, operator: str, left: Labels, right: Labels, matching: str, names: frozenset[str], more: frozenset[str]
    ) -> Labels:
        if left is None or right is None:
            return right if left is None else left
        if matching == "on":
            # The right side of `or` may have more labels, but both sides need each label of `on`.
            self._known(names, left, "on")
            self._known(names, right, "on")
        else:
            self._known(names, left | right, "ignoring")
            if operator not in {"or"} and left - names != right - names:
                self._fail(f"{sorted(left - names)} never match {sorted(right - names)}")
        return left if operator in SETS else left | more

    def _known(self, names: frozenset[str], labels: frozenset[str], where: str) -> None:
        if unknown := names - labels:
            self._fail(f"{where} ({', '.join(sorted(unknown))}): the labels there are {', '.join(sorted(labels))}")

    def _operand(self) -> Labels:
        if self._token == "(":
            self._next()
            labels = self.expression(0)
            self.take(")")
        elif self._kind in {"number", "string"}:
            self._next()
            labels = None
        elif self._token == "{":
            self._fail("a selector without a metric")
        else:
            labels = self._named(self._value("name"))
        if self._token == "[":
            self._next()
            self._value("duration")
            if self._kind == "name" and re.fullmatch(r":(\d\w*)?", self._token):
                self._next()
            self.take("]")
        if self._token == "offset":
            self._next()
            self._value("duration")
        return labels

    def _named(self, name: str) -> Labels:
        if name in AGGREGATIONS:
            return self._aggregation(name)
        if self._token == "(":
            if name not in FUNCTIONS:
                self._fail(f"no function {name}")
            return self._function(name)
        return self._selector(name)

    def _aggregation(self, name: str) -> Labels:
        grouping = self._grouping()
        arguments = self._list("(", ")", lambda: (self._token, self.expression(0)))
        grouping = grouping or self._grouping()
        labels = arguments[-1][1]
        if labels is None:
            self._fail(f"{name} of a number")
        if grouping is not None:
            self._known(grouping, labels, "by")
        if name in {"topk", "bottomk"}:
            return labels
        added = {arguments[0][0].strip("\"'")} if name == "count_values" else frozenset[str]()
        return (grouping or frozenset()) | added

    def _grouping(self) -> frozenset[str] | None:
        if self._token != "by":
            return None
        self._next()
        return frozenset(self._list("(", ")", lambda: self._value("name")))

    def _function(self, name: str) -> Labels:
        labels = [found for found in self._list("(", ")", lambda: self.expression(0)) if found is not None]
        if name == "vector":
            return frozenset()
        if not labels:
            return None
        if name == "histogram_quantile":
            self._known(frozenset({"le"}), labels[0], "histogram_quantile")
            return labels[0] - {"le"}
        return labels[0]

    def _selector(self, name: str) -> Labels:
        if name not in self._catalogue:
            self._fail(f"no metric {name}")
        labels = self._catalogue[name]
        asked = dict(self._list("{", "}", self._matcher)) if self._token == "{" else {}
        self._known(frozenset(asked), labels, name)
        self.query.selectors.append((name, asked))
        return labels

    def _matcher(self) -> tuple[str, str]:
        label = self._value("name")
        if self._token not in MATCHERS:
            self._fail(f"{self._token!r} is no matcher")
        self._next()
        return label, self._value("string")[1:-1]
