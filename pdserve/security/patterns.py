"""Finds patterns and words in text that strangers choose, also while the text arrives in pieces.

The time is at most in proportion to the length of the text times that of the longest match.
Python's `re` can take exponential time, and cannot say that a match may go on in the next piece.
Patterns have the syntax of `re`, without lookaround, references and possessive quantifiers. Of the
matches that begin first the longest one is found, as in POSIX.

A pattern becomes a nondeterministic automaton; sets of its nodes become the states of a
deterministic one as texts need them, as in RE2.
"""

from __future__ import annotations

import re

# Only the parser: it has been the same for many versions, as `sre_parse` in the older ones.
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MAX_NODES = 100_000  # of an automaton, about 200 bytes each
MAX_MOVES = 100_000  # known moves of states; all are forgotten beyond it
_START, _END = 0, 1
# What is before a character: the beginning of the text, a line break, a letter of a word, others.
_NOTHING, _BREAK, _LETTER, _OTHER = range(4)
_LINE_STARTS, _TEXT_START = (_NOTHING, _BREAK), (_NOTHING,)

_Condition = tuple[str, "tuple[int, ...]"]


class _State:
    """A set of nodes. `moves`, by character ("" is the end of the text): whether a match ends
    before it, and the next state, None if no match goes on. `begins`: a match may begin at each
    character, so there always is a next state."""

    __slots__ = ("before", "begins", "moves", "nodes")

    def __init__(self, nodes: frozenset[int], before: int, begins: bool) -> None:
        self.nodes, self.before, self.begins = nodes, before, begins
        self.moves: dict[str, tuple[bool, _State | None]] = {}


class Patterns:
    """An automaton for all of `patterns` and `words`. A word is found as a whole word, in upper or
    lower case. `longest`: limit of the characters of a match."""

    def __init__(
        self, patterns: Iterable[str] = (), words: Iterable[str] = (), *, longest: int = 256
    ) -> None:
        """Raises ValueError with the reason for a pattern that cannot be used."""
        # By node: edges without a character, by a character, and by a set of characters.
        self._jumps: list[list[tuple[_Condition | None, int]]] = []
        self._chars: list[dict[str, int]] = []
        self._sets: list[list[tuple[Callable[[str], bool], int]]] = []
        self._longest = longest
        self._states: dict[tuple[frozenset[int], int, bool], _State] = {}
        self._moves = 0
        for _ in (_START, _END):
            self._node()
        for pattern in patterns:
            try:
                parsed = _parser.parse(pattern)
                least, _ = parsed.getwidth()
                if not least:
                    raise ValueError("matches the empty text")
                if least > longest:
                    raise ValueError(f"has matches of {least} characters only; {longest} are held")
                end = self._add(parsed, self._after(_START), parsed.state.flags)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(str(error)) from error
            self._jump(end, _END)
        for word in words:
            self._add_word(word)

    def scan(
        self, text: str, begin: int = 0, *, final: bool = True
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the matches that begin at `begin` or later, and the position from which on the
        text is undecided: a match that begins there may go on, unless the text is `final`."""
        found: list[tuple[int, int]] = []
        size, checked = len(text), begin
        while begin < size:
            if begin >= checked and size - begin > self._longest:
                # One pass says where the first match ends: long texts mostly have none.
                checked = self._first_end(text, begin)
                begin = max(begin, checked - self._longest)
            end = self._match(text, begin, final)
            if end is None:
                return found, begin
            if end:
                found.append((begin, end))
            begin = end or begin + 1
        return found, size

    def _first_end(self, text: str, begin: int) -> int:
        """Return where the first match ends that begins at `begin` or later; the length of the text
        if none ends before."""
        state: _State | None = self._start(text, begin, begins=True)
        for at, char in enumerate(text[begin:], begin):
            assert state is not None
            accepts, state = state.moves.get(char) or self._move(state, char)
            if accepts:
                return at
        return len(text)

    def _match(self, text: str, begin: int, final: bool) -> int | None:
        """Return the end of the longest match that begins at `begin`, 0 without one, or None if the
        text must go on to tell."""
        state: _State | None = self._start(text, begin)
        found, size = 0, len(text)
        for at in range(begin, begin + self._longest + 1):
            assert state is not None
            if at < size:
                char = text[at]
            elif final:
                char = ""
            else:
                return None
            accepts, state = state.moves.get(char) or self._move(state, char)
            if accepts:
                found = at
            if state is None:
                break
        return found

    def _start(self, text: str, begin: int, *, begins: bool = False) -> _State:
        before = _kind(text[begin - 1]) if begin else _NOTHING
        return self._state(_ONLY_START, before, begins=begins)

    def _state(self, nodes: frozenset[int], before: int, *, begins: bool) -> _State:
        key = nodes, before, begins
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _State(*key)
        return state

    def _move(self, state: _State, char: str) -> tuple[bool, _State | None]:
        """Compute a move, and remember it."""
        if self._moves >= MAX_MOVES:
            self._moves = 0
            self._states = {}
        self._moves += 1
        closed: set[int] = set()
        todo, targets = [*state.nodes], set()
        while todo:
            if (node := todo.pop()) in closed:
                continue
            closed.add(node)
            todo += [x for condition, x in self._jumps[node] if _holds(condition, state, char)]
            if char:
                if (target := self._chars[node].get(char)) is not None:
                    targets.add(target)
                targets.update([x for has, x in self._sets[node] if has(char)])
        if state.begins:
            targets.add(_START)
        following = None
        if targets:
            following = self._state(frozenset(targets), _kind(char), begins=state.begins)
        move = state.moves[char] = (_END in closed, following)
        return move

    # -- Building

    def _node(self) -> int:
        if len(self._jumps) >= MAX_NODES:
            raise ValueError(f"is too large: more than {MAX_NODES} characters with repetitions")
        self._jumps.append([])
        self._chars.append({})
        self._sets.append([])
        return len(self._jumps) - 1

    def _jump(self, node: int, target: int, condition: _Condition | None = None) -> None:
        self._jumps[node].append((condition, target))

    def _after(self, node: int, condition: _Condition | None = None) -> int:
        """Return a new node behind `node`. Edges that are added to it do not extend others."""
        target = self._node()
        self._jump(node, target, condition)
        return target

    def _char(self, node: int, char: str, *, ignores_case: bool) -> int:
        known = self._chars[node].get(char)
        target = self._node() if known is None else known
        for each in _cases(char) if ignores_case else (char,):
            self._chars[node].setdefault(each, target)
        return target

    def _add_word(self, word: str) -> None:
        # Words that begin alike share nodes: the edges of this node are those of a tree.
        node = _START
        boundary: _Condition = ("boundary", ())
        if _kind(word[0]) == _LETTER:
            if not self._jumps[_START] or self._jumps[_START][0][0] is None:
                self._jumps[_START].insert(0, (boundary, self._node()))
            node = self._jumps[_START][0][1]
        for char in word:
            node = self._char(node, char, ignores_case=True)
        self._jump(node, _END, boundary if _kind(word[-1]) == _LETTER else None)

    def _add(self, items: Iterable[tuple[Any, Any]], node: int, flags: int) -> int:
        """Add the items of a parsed pattern behind `node`, and return the node behind them."""
        for op, value in items:
            node = self._add_one(op, value, self._after(node), flags)
        return node

    def _add_one(self, op: Any, value: Any, node: int, flags: int) -> int:
        if op is sre.LITERAL:
            return self._char(node, chr(value), ignores_case=bool(flags & re.IGNORECASE))
        if op in (sre.IN, sre.NOT_LITERAL, sre.ANY):
            target = self._node()
            self._sets[node].append((_char_test(op, value, flags), target))
            return target
        if op is sre.SUBPATTERN:
            _, more, fewer, items = value
            return self._add(items, node, (flags | more) & ~fewer)
        if op is sre.BRANCH:
            target = self._node()
            for items in value[1]:
                self._jump(self._add(items, self._after(node), flags), target)
            return target
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, items = value
            return self._repeat(least, most, items, node, flags)
        if op is sre.AT and value in _CONDITIONS:
            multiline = bool(flags & re.MULTILINE)
            return self._after(node, _CONDITIONS[value][multiline])
        raise ValueError(f"uses {str(op).lower()}, which is not supported")

    def _repeat(self, least: int, most: int, items: Any, node: int, flags: int) -> int:
        for _ in range(least):
            node = self._add(items, node, flags)
        if most is sre.MAXREPEAT:
            loop = self._after(node)
            self._jump(self._add(items, loop, flags), loop)
            return loop
        target = self._after(node)
        for _ in range(most - least):
            node = self._add(items, node, flags)
            self._jump(node, target)
        return target


_ONLY_START = frozenset({_START})
_CONDITIONS: dict[Any, tuple[_Condition, _Condition]] = {
    # Without and with re.MULTILINE.
    sre.AT_BEGINNING: (("begins", _TEXT_START), ("begins", _LINE_STARTS)),
    sre.AT_BEGINNING_STRING: (("begins", _TEXT_START),) * 2,
    sre.AT_END: (("ends", _TEXT_START), ("ends", _LINE_STARTS)),
    sre.AT_END_STRING: (("ends", _TEXT_START),) * 2,
    sre.AT_BOUNDARY: (("boundary", ()),) * 2,
    sre.AT_NON_BOUNDARY: (("inside", ()),) * 2,
}


def _kind(char: str) -> int:
    if char.isalnum() or char == "_":
        return _LETTER
    return _OTHER if char not in ("", "\n") else (_BREAK if char else _NOTHING)


def _holds(condition: _Condition | None, state: _State, char: str) -> bool:
    """Return True if a condition holds between what is before a state and `char`."""
    if condition is None:
        return True
    name, kinds = condition
    if name == "begins":
        return state.before in kinds
    if name == "ends":
        return _kind(char) in kinds
    return ((state.before == _LETTER) != (_kind(char) == _LETTER)) == (name == "boundary")


def _cases(char: str) -> set[str]:
    return {x for x in (char, char.lower(), char.upper()) if len(x) == 1}


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal,
    "SPACE": str.isspace,
    "WORD": lambda char: _kind(char) == _LETTER,
}


def _char_test(op: Any, value: Any, flags: int) -> Callable[[str], bool]:
    """Return a function that tells whether a set of a parsed pattern has a character."""
    if op is sre.ANY:
        return lambda char: char != "\n" or bool(flags & re.DOTALL)
    items: Sequence[tuple[Any, Any]] = value if op is sre.IN else [(sre.LITERAL, value)]
    negated = op is sre.NOT_LITERAL or items[0][0] is sre.NEGATE
    tests = [_item_test(*x, flags) for x in items if x[0] is not sre.NEGATE]
    ignores_case = flags & re.IGNORECASE

    def has(char: str) -> bool:
        chars = _cases(char) if ignores_case else (char,)
        return any(test(x) for test in tests for x in chars) != negated

    return has


def _item_test(op: Any, value: Any, flags: int) -> Callable[[str], bool]:
    if op is sre.LITERAL:
        return chr(value).__eq__
    if op is sre.RANGE:
        low, high = map(chr, value)
        return lambda char: low <= char <= high
    name = str(value).removeprefix("CATEGORY_")
    has, negated = _CATEGORIES[name.removeprefix("NOT_")], name.startswith("NOT_")
    if flags & re.ASCII:
        return lambda char: (has(char) and char.isascii()) != negated
    return lambda char: has(char) != negated
