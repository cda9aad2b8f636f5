"""Options of the command line made from the fields of `SamplingParams` and `Config`: a new field is a new option."""

import argparse
import inspect
import json
import re
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_options(parser: argparse.ArgumentParser, title: str, cls: type, skip: set[str]) -> None:
    """One option for each field of the dataclass `cls`, with the help of its docstring.

    Options that are not given leave no attribute, so that the dataclass's own defaults hold.
    """
    group = parser.add_argument_group(title)
    helps, hints = docstring_arguments(cls), typing.get_type_hints(cls)
    for f in fields(cls):
        if f.name not in skip:
            default = "" if f.default in (None, ()) else f" (default: {f.default})"
            text = (helps.get(f.name, "") + default).replace("%", "%%")
            flag = "--" + f.name.replace("_", "-")
            group.add_argument(flag, default=argparse.SUPPRESS, help=text, **argument_form(hints[f.name]))


def given_options(args: argparse.Namespace, cls: type, skip: set[str]) -> dict[str, Any]:
    """The fields of `cls` that the command line sets."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if f.name not in skip and hasattr(args, f.name)}


def argument_form(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type: switch, number, text, repeatable text, else JSON."""
    members = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
    optional = type(None) in members
    members.discard(type(None))
    if members == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if str in members and len(members) > 1:
        several = any(typing.get_origin(member) is list for member in members)
        return {"action": "append", "metavar": "TEXT"} if several else {"metavar": "TEXT"}
    if len(members) == 1 and (kind := next(iter(members))) in METAVARS:
        return {"type": none_or(kind) if optional and kind is not str else kind, "metavar": METAVARS[kind]}
    return {"type": json_value, "metavar": "JSON"}


def none_or(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """`kind`, or the word "none"."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it when it refuses a value
    return read


def json_value(text: str) -> Any:
    """A value written as JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from error


def docstring_arguments(cls: type) -> dict[str, str]:
    """What the `Args:` section of a docstring says of each name."""
    doc = inspect.getdoc(cls) or ""
    section = doc.partition("Args:\n")[2].partition("\n\n")[0]
    helps = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        names, _, text = entry.strip().partition(": ")
        helps.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return helps
