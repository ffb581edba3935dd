"""An option, and how its value is read: from the command line, the environment or Python, and from TOML alike.

A reader takes whatever was given, a text or a TOML value, and returns the value or raises ValueError, whose message
says what is expected and never repeats what was given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_NUMBER = (1 << 31) - 1
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is said: its help text, how a value is read, and the short flag if it has one."""

    help: str
    read: Callable[[Any], Any]
    metavar: str | None = None
    short: str | None = None

    @property
    def is_flag(self) -> bool:
        return self.read is flag


def text(value: Any) -> str:
    if not _is_text(value) or not value:
        raise ValueError("a text is expected, in UTF-8 and not empty")
    return str(value)


def text_or_empty(value: Any) -> str:
    return text(value) if value != "" else ""


def number(value: Any) -> int:
    count = _whole(value)
    if count is None or not 1 <= count <= _MAX_NUMBER:
        raise ValueError(f"a whole number from 1 to {_MAX_NUMBER} is expected")
    return count


def number_or_zero(value: Any) -> int:
    count = _whole(value)
    if count is None or not 0 <= count <= _MAX_NUMBER:
        raise ValueError(f"a whole number from 0 to {_MAX_NUMBER} is expected")
    return count


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _FLAGS:
        raise ValueError("true or false is expected")
    return _FLAGS[value.lower()]


def names(value: Any) -> tuple[str, ...]:
    """A list, or names separated by commas; no name at all is an empty list."""
    listed = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(_is_text(name) and name for name in listed):
        raise ValueError("names are expected, as a list or separated by commas")
    return tuple(listed)


def paths(value: Any) -> tuple[str, ...]:
    """One path, commas and all, or a list of them."""
    return names([value] if isinstance(value, str) else value)


def one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)} is expected")
        return str(value)

    return read


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `percent` of the rows, rounded up, or at most `count` rows. Decimal: 7 % of 100 rows are 7."""

    percent: Decimal = Decimal(0)
    count: int = 0

    def allows(self, failed: int, rows: int) -> bool:
        return failed <= max(self.count, math.ceil(self.percent * rows / 100))

    def __str__(self) -> str:
        return f"{self.percent}%" if self.percent else str(self.count)


def limit(value: Any) -> Limit:
    share = value.removesuffix("%") if isinstance(value, str) else value
    try:
        if share != value and 0 <= (percent := Decimal(share)) <= 100:
            return Limit(percent=percent)
    except ArithmeticError:  # no number, or nan
        pass
    count = _whole(value)
    if count is None or count < 0:
        raise ValueError("a number of rows (12) or a percentage (0.1%) is expected")
    return Limit(count=count)


def share(value: str) -> Fraction:
    """A part of the whole, more than nothing: a percentage, or a fraction of one."""
    try:
        part = Fraction(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        if 0 < part <= 1:
            return part
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError("a share of the rows is expected: a percentage (0.1%) or a fraction (0.001), more than 0")


def _is_text(value: Any) -> bool:
    """No system call takes a NUL, and no tokenizer takes half a surrogate pair, which is what bad UTF-8 becomes."""
    return isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value) is None


def _whole(value: Any) -> int | None:
    """An integer, or the digits of one; a float would be cut, and a bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None
