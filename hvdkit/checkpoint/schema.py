"""Typed records from JSON: a schema is declared once, and whatever does not fit is an error that names file and field.

A schema is a function that returns the checked value, or raises :class:`FieldError`. The functions of this module build
schemas from others; :func:`checked` applies one.

Example:
    >>> schema = typed(dict, step=integer(), shape=array(integer(), most=3))
    >>> checked({"step": 7, "shape": [2, 3]}, schema, "manifest.json")
    {'step': 7, 'shape': (2, 3)}
    >>> checked({"step": 7, "shape": [2, -3]}, schema, "manifest.json")
    Traceback (most recent call last):
        ...
    hvdkit.errors.CorruptCheckpointError: manifest.json: shape[1]: got -3, expected an integer from 0 to ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from hvdkit.checkpoint.bounds import (
    BYTES_PER_JSON_VALUE,
    DEPTH,
    JSON_VALUES,
    NAME_LENGTH,
    TEXT_LENGTH,
    TOTAL_BYTES,
)
from hvdkit.errors import CorruptCheckpointError

T = TypeVar("T")
Schema: TypeAlias = Callable[[object], T]

_SHOWN = 60  # characters of a wrong value in a message


class FieldError(ValueError):
    """A value does not fit its schema.

    Attributes:
        got, expected: the value, and a description of what would fit.
        fields: keys and indices that lead to the value.
    """

    def __init__(self, got: object, expected: str, *fields: str | int):
        super().__init__(got, expected)
        self.got = got
        self.expected = expected
        self.fields = [*fields]

    def __str__(self) -> str:
        shown = ascii(self.got) if isinstance(self.got, str | int | float | None) else f"a {type(self.got).__name__}"
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return f"{_place(self.fields)}got {shown}, expected {self.expected}"


def _place(fields: list[str | int]) -> str:
    text = ""
    for field in fields:
        is_plain = isinstance(field, str) and re.fullmatch(r"[a-z_]{1,30}", field)
        text += f"{'.' if text else ''}{field}" if is_plain else f"[{ascii(field)[: 2 * _SHOWN]}]"
    return f"{text}: " if text else ""


def checked(value: object, schema: Schema[T], file: object) -> T:
    """Return ``value`` as ``schema`` returns it, or raise CorruptCheckpointError that names ``file`` and the field."""
    try:
        return schema(value)
    except FieldError as error:
        raise CorruptCheckpointError(f"{file}: {error}") from None


def json_of(text: bytes | bytearray | str, file: object) -> object:
    """Return parsed JSON.

    Raises:
        CorruptCheckpointError: it is not JSON in UTF-8, is nested too deeply, or has more arrays and objects than its
            length can explain: ``[[],[],...]`` takes 30 times its length in memory, and minutes.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        problem = too_many_values(text)
        if problem is not None:
            raise CorruptCheckpointError(f"{file}: {problem}")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[: 4 * _SHOWN]}"
        raise CorruptCheckpointError(f"{file}: is damaged ({reason})") from None


def too_many_values(text: str) -> str | None:
    """Return a description of JSON with too many opening brackets, of arrays, objects and text; None if few enough."""
    most = JSON_VALUES + len(text) // BYTES_PER_JSON_VALUE
    found = text.count("[") + text.count("{")
    return f"has {found} brackets, expected at most {most}" if found > most else None


def integer(minimum: int = 0, maximum: int = TOTAL_BYTES) -> Schema[int]:
    """Return the schema of an integer."""

    def check(value: object) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise FieldError(value, f"an integer from {minimum} to {maximum}")
        return value

    return check


def text(
    pattern: re.Pattern[str] | None = None, expected: str = "a string", *, most: int | None = TEXT_LENGTH
) -> Schema[str]:
    """Return the schema of a string of at most ``most`` characters that matches ``pattern``; surrogates do not fit."""

    def check(value: object) -> str:
        if type(value) is not str or (pattern is not None and not pattern.fullmatch(value)):
            raise FieldError(value, expected)
        if most is not None and len(value) > most:
            raise FieldError(f"{len(value)} characters", f"at most {most}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise FieldError(value, "characters that UTF-8 can encode") from None
        return value

    return check


entry_name = text(expected="a name", most=NAME_LENGTH)
"""Schema of the name of a tensor or a value."""


def choice(options: Mapping[str, T]) -> Schema[T]:
    """Return the schema of a key of ``options``, which is replaced by its value."""

    def check(value: object) -> T:
        if type(value) is not str or value not in options:
            raise FieldError(value, f"one of {', '.join(options)}")
        return options[value]

    return check


def optional(schema: Schema[T]) -> Schema[T | None]:
    """Return the schema of null, or of what fits ``schema``."""
    return lambda value: None if value is None else schema(value)


def array(item: Schema[T], *, most: int | None = None, exactly: int | None = None) -> Schema[tuple[T, ...]]:
    """Return the schema of an array, which becomes a tuple."""

    def check(value: object) -> tuple[T, ...]:
        if type(value) is not list and type(value) is not tuple:
            raise FieldError(value, "an array")
        if (most is not None and len(value) > most) or (exactly is not None and len(value) != exactly):
            raise FieldError(len(value), f"{'at most ' if exactly is None else ''}{exactly or most} elements")
        try:
            return tuple(map(item, value))
        except FieldError:
            return tuple(_each(enumerate(value), item))  # raises again, with the place

    return check


def mapping(item: Schema[T], key: Schema[str] = entry_name) -> Schema[dict[str, T]]:
    """Return the schema of an object with any keys that fit ``key``; by default names of tensors or values."""

    def check(value: object) -> dict[str, T]:
        if type(value) is not dict:
            raise FieldError(value, "an object")
        for each in value:
            key(each)
        try:
            return dict(zip(value, map(item, value.values()), strict=True))
        except FieldError:
            return dict(zip(value, _each(value.items(), item), strict=True))  # raises again, with the place

    return check


def _each(items: Iterable[tuple[str | int, object]], item: Schema[T]) -> Iterator[T]:
    for place, value in items:
        try:
            yield item(value)
        except FieldError as error:
            error.fields.insert(0, place)
            raise


def typed(make: Callable[..., T], **fields: Schema[object]) -> Schema[T]:
    """Return the schema of an object with at least ``fields``, which become arguments of ``make``."""

    def check(value: object) -> T:
        if type(value) is not dict:
            raise FieldError(value, "an object")
        arguments = {}
        for field, schema in fields.items():
            try:
                if field not in value:
                    raise FieldError(None, "a value")
                arguments[field] = schema(value[field])
            except FieldError as error:
                error.fields.insert(0, field)
                raise
        return make(**arguments)

    return check


def plain(value: object) -> object:
    """Schema of any JSON value that is nested at most :data:`DEPTH` times; it stays as it is."""
    level = [value]
    depth = 0
    while level:
        if depth > DEPTH:
            raise FieldError(f"{depth} levels", f"at most {DEPTH} levels of nesting")
        nested = [each for each in level if isinstance(each, dict | list | tuple)]
        level = [child for each in nested for child in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return value
