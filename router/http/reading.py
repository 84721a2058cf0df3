"""Reading JSON strictly: what is not exactly what the API says is refused, with its path."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from pdserve.errors import InvalidRequest, UnknownField

if TYPE_CHECKING:
    from collections.abc import Collection


def refuse(path: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{path} {reason}", field=path)


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`.

    Raises InvalidRequest for what is not UTF-8, not JSON (NaN and duplicate keys included), not an
    object, or nested too deep.
    """
    try:
        value = _DECODER.decode(body.decode("utf-8"))
        if b"\\ud" in body or b"\\uD" in body:
            # JSON can escape half a surrogate pair, which no text is.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body holds half a surrogate pair") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {kind_of(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidRequest(f"{name} is given twice", field=name)
            seen.add(name)
    return values


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)


def kind_of(value: object) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, dict) else "an array"


class Fields:
    """A JSON object under its path. A field that is null counts as not given."""

    __slots__ = ("_at", "_values")

    def __init__(self, values: dict[str, object], at: str = "") -> None:
        self._values = values
        self._at = at

    def path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name

    def get(self, name: str) -> object:
        return self._values.get(name)

    def allow(self, names: Collection[str]) -> None:
        """Raises UnknownField for a field that is not among `names`."""
        for name in self._values:
            if name not in names:
                path = self.path(name)
                raise UnknownField(f"{path} is not a field of this endpoint", field=path)

    def string(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            refuse(self.path(name), f"must be a string, not {kind_of(value)}")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.path(name), f"must be a boolean, not {kind_of(value)}")
        return value

    def integer(self, name: str, *, minimum: int | None = None) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is not int:
            refuse(self.path(name), f"must be an integer, not {_shown(value)}")
        if minimum is not None and value < minimum:
            refuse(self.path(name), f"must be at least {minimum}, not {value}")
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        return None if value is None else as_number(value, self.path(name))

    def section(self, name: str) -> Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.path(name), f"must be an object, not {kind_of(value)}")
        return Fields(value, self.path(name))

    def items(self) -> list[tuple[str, object]]:
        return list(self._values.items())

    def array(self, name: str) -> list[object] | None:
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            refuse(self.path(name), f"must be an array, not {kind_of(value)}")
        return value


def as_number(value: object, path: str) -> float:
    """A finite number; 1e999 is JSON and infinite, so it is refused here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(path, f"must be a number, not {kind_of(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        refuse(path, "must be a finite number")
    return number


def as_strings(values: list[object], path: str) -> tuple[str, ...]:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            refuse(f"{path}[{i}]", f"must be a string, not {kind_of(value)}")
    return tuple(values)  # type: ignore[arg-type]


def as_token_ids(values: list[object], path: str) -> tuple[int, ...]:
    """Non-negative integers; whether the model has them is for the intake to say."""
    # One pass in C for the prompts of thousands; the slow loop only names the culprit.
    if set(map(type, values)) <= {int} and (not values or min(values) >= 0):  # type: ignore[type-var, operator]
        return tuple(values)  # type: ignore[arg-type]
    for i, value in enumerate(values):
        if type(value) is not int:
            refuse(f"{path}[{i}]", f"must be a token id, not {_shown(value)}")
        if value < 0:
            refuse(f"{path}[{i}]", f"must be a token id, not {value}")
    raise AssertionError("no item is at fault")


def _shown(value: object) -> str:
    return f"{value}" if isinstance(value, float) else kind_of(value)
