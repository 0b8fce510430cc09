"""The catalogue of error messages, from the sources, which are installed with hvdkit.

Most messages are calls of ``describe``. Others are the texts of hvdkit's own errors, as of a damaged file, and what the
last line of a job says about a rank.
"""

from __future__ import annotations

import ast
import difflib
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdkit import errors
from hvdkit.commands.docs.headings import anchor
from hvdkit.errors import HvdkitError, describe, see
from hvdkit.watchdog.events import Failed
from hvdkit.watchdog.verdict import Judged

PACKAGE = Path(errors.__file__).parent
PLACEHOLDER = "…"
# Stands for the argument in messages about several arguments.
_ANY = "several arguments"
_PLACEHOLDERS = re.compile(f"{PLACEHOLDER}+")
# Characters of a message, apart from its values, by which a text is recognized as this message.
_FEWEST_CHARACTERS = 12
# Of the texts that one call may give.
_MOST_ALTERNATIVES = 12
# The errors whose texts are listed, besides calls of describe.
_ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, HvdkitError)}
# Functions that compare values of all ranks: the place of the name of what they compare, before that of the remedy.
_COMPARISONS = {"compare": 1, "agree": 2}
# What they expect, if that depends on the program.
_SHOWN = f"{PLACEHOLDER}, as on rank {PLACEHOLDER}"
# A word of a pasted message that the catalogue does not have: a value.
_NUMBER = re.compile(r"[\d.,:;()]+")
# Functions that log a warning; what they log is formatted with %.
_WARNINGS = {"get_logger().warning", "warn_once", "logs.warn_once"}
_PERCENT = re.compile(r"%[sdrg]|%\.\d+[fg]")
# Events with which the watchdog says how a rank ended.
_ENDS = {Failed.__name__, Judged.__name__}
# A value that is known only when the program runs.
_UNKNOWN = ast.Constant(None)
# What Markdown would interpret. An underscore between letters is one.
_MARKUP = re.compile(r"[*<\[]|(?<!\w)_|_(?!\w)")


class Entry(NamedTuple):
    """A message; parts that vary are placeholders.

    The title is the heading below which the message is listed: an argument, the class of an error, ``warnings``, or
    ``rank`` for how a rank ended, in the last line of a job.
    """

    title: str
    what: str  # was expected of an argument; otherwise the message up to the remedy
    remedy: str  # may be empty
    parts: tuple[str, ...]  # texts in the message that the user sees, with values between them
    text: str  # in which words are searched

    def line(self, title: str) -> str:
        """Return a line of Markdown for the message below a title, which may be a similar argument."""
        about = "" if self.title == title else f"`{self.title}`: "
        remedy = f"; *{_escaped(self.remedy)}*" if self.remedy else ""
        return f"- {about}{_escaped(self.what)}{remedy}"

    def likeness(self, text: str) -> int:
        """Return how many characters of this message, apart from values, are in ``text`` as whole parts of it.

        Example:
            >>> entry = _entry_of_argument("splits", "one entry per rank (…)", "pass … row counts")
            >>> entry.likeness("splits: got [1, 2], expected one entry per rank (4); pass 4 row counts")
            57
            >>> entry.likeness("splits: got [1, 2], expected integers; pass integers")
            11
        """
        return sum(_literal_characters(part) for part in self.parts if _pattern(part).search(text))


def _entry_of_argument(argument: str, expected: str, remedy: str) -> Entry:
    what = f"expected {expected}"
    parts = (f"{argument}: got", what, remedy)
    if argument == PLACEHOLDER:
        argument = _ANY
    return Entry(argument, what, remedy, parts, f"{argument}: {what}; {remedy}")


def _entry_of_text(title: str, text: str) -> Entry:
    what, _, remedy = text.rpartition("; ") if "; " in text else (text, "", "")
    return Entry(title, what, remedy, tuple(text.split("; ")), text)


def _entry_of_rank_end(verb: str, cause: str) -> Entry:
    """Return the entry of ``rank 1 on host-b VERB at step 20: CAUSE``.

    Example:
        >>> _entry_of_rank_end("hangs", "no progress for … s").likeness("rank 1 hangs at step 2: no progress for 6 s")
        23
    """
    text = f"{verb}: {cause}" if cause else verb
    return _entry_of_text("rank", text)._replace(parts=(verb, *cause.split("; ")))


@functools.cache
def entries(package: Path = PACKAGE) -> tuple[Entry, ...]:
    """Return the messages in the sources of a package, sorted, each once."""
    found: set[Entry] = set()
    for path in package.rglob("*.py"):
        found |= set(_entries_of(ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(sorted(found))


def listing(of: Iterable[Entry]) -> str:
    """Return Markdown with a heading for each argument and class of errors, and a line for each of its messages."""
    by_anchor: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in of:
        by_anchor[anchor(entry.title)].append(entry)
    parts = []
    # An argument whose name depends on the program, "…", comes last.
    for name in sorted(by_anchor, key=lambda name: (not name.strip("-"), name.lstrip("-").lower(), name)):
        title = min((entry.title for entry in by_anchor[name]), key=len)
        parts += [f"## `{title}`", "\n".join(entry.line(title) for entry in by_anchor[name])]
    return "\n\n".join(parts)


def search(words: Sequence[str], among: Sequence[Entry]) -> list[Entry]:
    """Return the messages that a user means with a message, a part of it, or words that it contains.

    Raises:
        ValueError: no message is meant.

    Example:
        >>> known = [_entry_of_argument("np", "at most … ranks", "lower it"), _entry_of_argument("x", "an array", "-")]
        >>> [entry.title for entry in search(["np: got 5000, expected at most 4096 ranks"], known)]
        ['np']
        >>> [entry.title for entry in search(["Array"], known)]
        ['x']
    """
    text = " ".join(" ".join(words).split())
    scores = [entry.likeness(text) for entry in among]
    best = max(scores, default=0)
    if best >= _FEWEST_CHARACTERS:
        return [entry for entry, score in zip(among, scores, strict=True) if score == best]
    wanted = [word for word in text.lower().split() if not _NUMBER.fullmatch(word)] or [text]
    found = [entry for entry in among if all(word in entry.text.lower() for word in wanted)]
    if not found:
        unknown = [word for word in wanted if not any(word in entry.text.lower() for entry in among)]
        titles = {entry.title for entry in among}
        near = [name for word in unknown for name in difflib.get_close_matches(word, titles, 1)]
        hint = f"did you mean {near[0]}? " if near else ""
        remedy = f"{hint}`hvdkit docs messages` shows them"
        raise ValueError(describe("WORDS", text, "a message, or words that are all in one message", remedy))
    return found


class _Scope(NamedTuple):
    """What may have assigned a variable at a place of a function or a module: arguments, and the statements before."""

    arguments: tuple[str, ...]
    before: tuple[ast.stmt, ...]


def _entries_of(module: ast.Module) -> Iterator[Entry]:
    parents = _parents(module)
    for node in parents:
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        if function == "describe" and len(node.args) == 4:
            texts = _alternatives((node.args[0], *node.args[2:]), _scopes(node, parents))
            yield from _messages(texts)
        elif (first := _COMPARISONS.get(function.rpartition(".")[2])) is not None and len(node.args) == first + 2:
            scopes = _scopes(node, parents)
            what, remedy = node.args[first:]
            show = next((keyword.value for keyword in node.keywords if keyword.arg == "show"), _UNKNOWN)
            yield from _messages(
                (argument, expected, text)
                for argument, text in _alternatives((what, remedy), scopes)
                for expected in _expected_by(show, scopes)
            )
        elif (function in _ERRORS and len(node.args) == 1) or (function in _WARNINGS and node.args):
            title = function if function in _ERRORS else "warnings"
            for text in _texts(node.args[0], _scopes(node, parents))[:_MOST_ALTERNATIVES]:
                shown = " ".join(_PERCENT.sub(PLACEHOLDER, text).split())
                if _literal_characters(shown) >= _FEWEST_CHARACTERS:
                    yield _entry_of_text(title, shown)
        elif function in _ENDS:
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            said = (named.get("verb", ast.Constant("failed")), named.get("cause", ast.Constant("")))
            for verb, cause in itertools.islice(_alternatives(said, _scopes(node, parents)), _MOST_ALTERNATIVES):
                if _literal_characters(verb + cause) >= _FEWEST_CHARACTERS:
                    yield _entry_of_rank_end(verb, cause)


def _messages(texts: Iterable[tuple[str, ...]]) -> Iterator[Entry]:
    """Yield messages of arguments, what was expected of them and remedies, unless nothing of it is known."""
    for argument, expected, remedy in itertools.islice(texts, _MOST_ALTERNATIVES):
        if remedy != PLACEHOLDER or expected not in {PLACEHOLDER, _SHOWN}:
            yield _entry_of_argument(argument, expected, remedy)


def _expected_by(show: ast.expr, scopes: Sequence[_Scope]) -> list[str]:
    """Return what a comparison of ranks expects: the second text of each pair that its ``show`` returns."""
    values = [(show.body, scopes)] if isinstance(show, ast.Lambda) else []
    if isinstance(show, ast.Name):
        values = _returns(show.id, scopes[-1])
    pairs = [(value, around) for value, around in values if isinstance(value, ast.Tuple) and len(value.elts) == 2]
    texts = [text for value, around in pairs for text in _texts(value.elts[1], around)]
    return [_SHOWN if text == PLACEHOLDER else text for text in texts or [PLACEHOLDER]]


def _parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _alternatives(nodes: Sequence[ast.expr], scopes: Sequence[_Scope]) -> Iterable[tuple[str, ...]]:
    """Return what the texts of several expressions may be."""
    texts = [_texts(node, scopes) for node in nodes]
    several = [node for node, values in zip(nodes, texts, strict=True) if len(values) > 1]
    numbers = {len(values) for values in texts} - {1}
    if len(numbers) == 1 and all(isinstance(node, ast.Name) for node in several):
        number = numbers.pop()  # variables that are assigned together, in the branches of an if
        return list(zip(*(values if len(values) > 1 else values * number for values in texts), strict=True))
    return itertools.product(*texts)


def _scopes(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> list[_Scope]:
    """Return the scopes around a node, innermost first."""
    scopes = []
    before: list[ast.stmt] = []
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.Module):
            scopes.append(_Scope((), tuple(parent.body)))
            break
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and node in block and isinstance(node, ast.stmt):
                before[:0] = block[: block.index(node)]
        if isinstance(parent, ast.FunctionDef | ast.Lambda):
            arguments = tuple(each.arg for each in ast.walk(parent.args) if isinstance(each, ast.arg))
            scopes.append(_Scope(arguments, tuple(before)))
            before = []
        node = parent
    return scopes


def _texts(node: ast.expr, scopes: Sequence[_Scope], through: Sequence[str] = ()) -> list[str]:
    """Return what the text of an expression may be, with placeholders for what is known only when the program runs.

    ``through`` has the names of the variables and functions through which the expression was reached.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return _joined([_texts(part, scopes, through) for part in node.values])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _joined([_texts(node.left, scopes, through), _texts(node.right, scopes, through)])
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, scopes, through)
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scopes, through), *_texts(node.orelse, scopes, through)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == see.__name__ and len(node.args) == 1:
        return [see(page) for page in _texts(node.args[0], scopes, through)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in through:
        called = (*through, node.func.id)
        values = _returns(node.func.id, scopes[-1])
        return [text for value, around in values for text in _texts(value, around, called)] or [PLACEHOLDER]
    if isinstance(node, ast.Name) and node.id not in through:
        for index, scope in enumerate(scopes):
            if stores := _stores(scope, node.id):
                around = scopes[index:]
                return [text for value in stores for text in _texts(value, around, (*through, node.id))]
    return [PLACEHOLDER]


def _returns(function: str, module: _Scope) -> list[tuple[ast.expr, Sequence[_Scope]]]:
    """Return what a function of a module may return, with the scopes around it; nothing if there is none."""
    found: list[tuple[ast.expr, Sequence[_Scope]]] = []
    for statement in module.before:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            parents = _parents(statement)
            for node in parents:
                if isinstance(node, ast.Return) and node.value is not None:
                    found.append((node.value, [*_scopes(node, parents), module]))
    return found


def _stores(scope: _Scope, name: str) -> list[ast.expr]:
    """Return the values that a variable may have in a scope, the last assigned one first."""
    found: list[ast.expr] = []
    for statement in reversed(scope.before):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        found += _values(statement, name)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and found:  # not in a branch
            return found
    return [*found, _UNKNOWN] if name in scope.arguments else found


def _values(statement: ast.stmt, name: str) -> list[ast.expr]:
    """Return the values that a statement, or those in it, assigns to a variable."""
    found: list[ast.expr] = []
    stores = 0
    for node in ast.walk(statement):
        stores += isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Assign) and [each.id for each in node.targets if isinstance(each, ast.Name)] == [name]:
            found.append(node.value)
    return [*found, _UNKNOWN] if stores > len(found) else found


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    texts = ("".join(chosen) for chosen in itertools.product(*parts))
    return [_PLACEHOLDERS.sub(PLACEHOLDER, text) for text in itertools.islice(texts, _MOST_ALTERNATIVES)]


def _pattern(part: str) -> re.Pattern[str]:
    """Return the pattern of a part of a message, with any text in place of its placeholders."""
    return re.compile(".*?".join(re.escape(literal) for literal in part.split(PLACEHOLDER)))


def _literal_characters(part: str) -> int:
    return len(part.replace(PLACEHOLDER, "").strip())


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", text)
