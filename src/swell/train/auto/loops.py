"""Loops of a script that count the batches they draw, and go on when a pass over the DataLoader is over.

A newcomer draws one batch in each pass that is over, because the usual script has a loop over the batches of
each pass. That is wrong for a loop that counts steps:

    batches = iter(loader)
    for step in range(600):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)

How far `range` has come is in no variable, so it cannot travel: a newcomer must draw as often as the job did.
`drawn_in` recognises such loops by the calls that are active when a pass begins, and by their source: a
*counting* loop is a `for` over something else than the batches, inside of which the iterator over them was
not made. (It may be made again there, under a condition, or by a generator with a loop of its own.)
"""

from __future__ import annotations

import ast
import ctypes
import dis
import functools
import gc
import inspect
import itertools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

from swell.train.auto import held

_COUNTING = frozenset({"enumerate", "islice", "range", "zip", "zip_longest"})
"""Functions whose iterators count what they give."""
_HOLDERS = (zip, enumerate, map, filter, itertools.islice, itertools.chain, tuple)
"""What may lie between an `itertools.cycle` and the pass that it repeats."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NAMES_OF_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class SourceLoop(NamedTuple):
    """A loop in the script's source."""

    file: str
    line: int
    column: int


def drawn_in(frames: list[FrameType]) -> frozenset[SourceLoop]:
    """The counting loops around a draw from a pass; `frames`: the script's calls, outermost first."""
    calls = [
        (str(f.f_globals.get("__name__", "")), f.f_code.co_filename, f.f_code, f.f_lasti) for f in frames
    ]
    return _drawn_in(tuple(calls))


@functools.lru_cache(maxsize=256)
def _drawn_in(calls: tuple[tuple[str, str, CodeType, int], ...]) -> frozenset[SourceLoop]:
    """The same by the module, the file, the code and the instruction of each call; passes begin alike."""
    life = _Life()
    for module, file, code, instruction in reversed(calls):
        if module == "accelerate.data_loader":
            if code.co_flags & inspect.CO_GENERATOR:
                life.leave_generator(code.co_name)
            continue
        if module.startswith(held.FRAMEWORKS):
            return frozenset()  # their loops count in attributes, which travel
        place = _place(file, code, instruction)
        if place is None:
            return frozenset()  # without its source nothing is known of it
        if life.leave(place):
            break
    return frozenset(life.counting)


def around(frames: list[FrameType]) -> frozenset[SourceLoop]:
    """All `for` loops that are in the middle of their body."""
    found: set[SourceLoop] = set()
    for frame in frames:
        if (place := _place(frame.f_code.co_filename, frame.f_code, frame.f_lasti)) is not None:
            found |= {place.loop(at.node) for at in place.path if at.counts}
    return frozenset(found)


def nodes_around(frame: FrameType) -> list[ast.AST] | None:
    """The statements and expressions around where a call is, outermost first; None without its source."""
    place = _place(frame.f_code.co_filename, frame.f_code, frame.f_lasti)
    return None if place is None else [at.node for at in place.path]


def is_repeated(begun: object) -> bool:
    """Whether an `itertools.cycle` keeps what it draws from the pass `begun`, to give it again and again."""
    level: list[Any] = [begun]
    for _ in range(5):
        holders = [h for h in gc.get_referrers(*level) if type(h) in (itertools.cycle, *_HOLDERS)]
        if any(type(holder) is itertools.cycle for holder in holders):
            return True
        if not holders:
            return False
        level = holders
    return False


# ---------------------------------------------------------------------- how far `enumerate` has counted


def counts(begun: object) -> list[int]:
    """How far each `enumerate` over the pass `begun` has counted, the innermost first."""
    return [_count_of(one) for one in _enumerates(begun)]


def set_counts(begun: object, wanted: list[int]) -> bool:
    """Have each `enumerate` over a pass go on from such a count; False if one of them cannot be set.

    Python has no way to do that, so its memory is written, as a debugger does; first and afterwards it is
    checked that the count is there.
    """
    found = _enumerates(begun)
    return len(found) == len(wanted) and all(map(set_count, found, wanted))


def set_count(one: Any, count: int) -> bool:
    """Have an `enumerate` count on from there; False if that cannot be done."""
    place = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
    if _count_of(one) == count:
        return True
    if place.value != _count_of(one):
        return False
    place.value = count
    return _count_of(one) == count


def _count_of(one: Any) -> int:
    return int(one.__reduce__()[1][1])


def _enumerates(begun: object) -> list[Any]:
    """The `enumerate` objects over a pass; other iterators may lie between (progress bars are generators)."""
    found: list[Any] = []
    running = [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_running]
    level: list[Any] = [begun, *running]  # which draw from the pass just now
    for _ in range(3):
        holders = [h for h in gc.get_referrers(*level) if type(h) in _HOLDERS and type(h) is not tuple]
        found += [holder for holder in holders if type(holder) is enumerate and holder not in found]
        level = holders
        if not level:
            break
    return found


# ---------------------------------------------------------------------- the life of a pass, from inside out


@dataclass
class _Life:
    """Follows the calls outwards from a draw, up to where the pass (or the generator around it) was begun."""

    counting: list[SourceLoop] = field(default_factory=list)
    renewed: bool = False
    """Whether the pass can be begun again in what was followed so far."""
    names: set[str] = field(default_factory=set)
    """Variables that hold the iterator, if they are known."""
    makers: frozenset[str] = frozenset({"iter"})
    """Functions that make it."""
    generator: str = ""
    """The name of the generator function that draws, once its call was left."""
    loops_around: int = 0
    """How many loops of the same call are around the statement that makes the iterator."""

    def leave(self, place: _Place) -> bool:
        """Follow the life through one call; True if it began there."""
        self.names = self._held(place)
        begun = self._leave_blocks(place)
        if place.is_generator:
            self.renewed = self.renewed or (begun and self.loops_around > 0)
            self.counting = [] if begun else self.counting
            self.leave_generator(place.name)
            return False
        if not begun and self.names & place.parameters:
            self.names = set()  # the caller has another name for it
        return begun

    def leave_generator(self, name: str) -> None:
        """From here on follow the life of the generator `name`, whose own loops begin pass after pass."""
        self.generator, self.names = name, set()
        self.makers = frozenset({"iter" if name == "__iter__" else name})

    def _leave_blocks(self, place: _Place) -> bool:
        """Follow the life through the loops and conditions of one call; True if it began among them."""
        in_loop = False
        self.loops_around = sum(at.is_loop and at.inside for at in place.path)
        for at in reversed(place.path):
            node = at.node
            if at.iterates:
                if self._leave_iteration(place, node):
                    return True
                in_loop = True
            elif at.is_loop and at.inside:
                if self._made_in(at.body, always=True):
                    return True
                self.loops_around -= 1
                if at.counts:
                    self.counting.append(place.loop(node))
                self.renewed = self.renewed or self._made_in(at.body)
                in_loop = True
            elif isinstance(node, ast.If | ast.ExceptHandler) and self._made_in(at.before, always=True):
                if in_loop:
                    return True
                self.renewed = True
        if self._made_in(place.before, always=True):
            return True
        self.renewed = self.renewed or (place.is_function and self._made_in(place.body))
        return False

    def _leave_iteration(self, place: _Place, node: ast.AST) -> bool:
        """The draw is made by a `for` (or a comprehension, or `yield from`) over an iterator; True if that
        makes the iterator."""
        source = _source_of(node)
        counts = source is not None and _calls(source, _COUNTING)
        if counts and self.renewed:
            self.counting.append(place.loop(node))
        if not self.generator:
            return True
        return source is None or _calls(source, self.makers) or self.generator == "__iter__"

    def _held(self, place: _Place) -> set[str]:
        """The variables of a call in which it may hold the iterator, or the same names as further inside."""
        call = next((at.node for at in reversed(place.path) if isinstance(at.node, ast.Call)), None)
        iterated = next((_source_of(at.node) for at in place.path if at.iterates), None)
        if iterated is not None:
            return {name for part in ast.walk(iterated) if (name := _last(part))}
        if call is None:
            return self.names
        if _last(call.func) in ("next", "anext") and call.args:
            return {_last(call.args[0])}
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("next", "__next__"):
            return {_last(call.func.value)}
        if self.names:
            return self.names
        given = (*call.args, *(keyword.value for keyword in call.keywords))
        return {name for argument in given if (name := _last(argument))}

    def _made_in(self, block: list[ast.stmt], *, always: bool = False) -> bool:
        """Whether the iterator is made in these statements; `always`: whenever they are executed."""
        for statement in block:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if isinstance(statement, ast.With | ast.AsyncWith):
                if self._made_in(statement.body, always=always):
                    return True
            elif isinstance(statement, ast.Try):
                if self._made_in(statement.body, always=always):
                    return True
                if not always and any(_renews(h) or self._made_in(h.body) for h in statement.handlers):
                    return True
            elif isinstance(statement, ast.If | ast.While | ast.For | ast.AsyncFor):
                if not always and self._made_in([*statement.body, *statement.orelse]):
                    return True
            elif self._makes(statement):
                return True
        return False

    def _makes(self, statement: ast.stmt) -> bool:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        if self.names and targets:
            return any(_last(part) in self.names for target in targets for part in ast.walk(target))
        if targets or isinstance(statement, ast.Expr | ast.Return):
            return not self.names and _calls(statement, self.makers)
        return False


def _renews(handler: ast.ExceptHandler) -> bool:
    """Whether a handler of the end of a pass goes on after it."""
    caught = handler.type is not None and "StopIteration" in {_last(part) for part in ast.walk(handler.type)}
    return caught and not isinstance(handler.body[-1], ast.Break | ast.Raise | ast.Return)


def _calls(node: ast.AST, names: frozenset[str]) -> bool:
    return any(isinstance(part, ast.Call) and _last(part.func) in names for part in ast.walk(node))


def _last(node: ast.AST) -> str:
    """The last name of an expression: `a` of `a`, `b` of `a.b`, and `a` of `a[0]`."""
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _source_of(node: ast.AST) -> ast.expr | None:
    """What a loop (or `yield from`) iterates over."""
    if isinstance(node, ast.For | ast.AsyncFor):
        return node.iter
    if isinstance(node, ast.YieldFrom):
        return node.value
    if isinstance(node, _COMPREHENSIONS):
        return node.generators[0].iter
    return None


# ---------------------------------------------------------------------- a place in the source


@dataclass(frozen=True)
class _At:
    """A node of the source around a place."""

    node: ast.AST
    inside: bool
    """Whether the place is in the node's body, if it is a loop."""
    iterates: bool
    """Whether the node is a loop that is just asking for its next element."""
    before: list[ast.stmt]
    """The statements of the node's block that come before the place."""

    @property
    def is_loop(self) -> bool:
        return isinstance(self.node, (ast.For, ast.AsyncFor, ast.While, *_COMPREHENSIONS))

    @property
    def counts(self) -> bool:
        """Whether the place is in the body of a loop whose count is in no variable."""
        return self.is_loop and self.inside and not isinstance(self.node, ast.While)

    @property
    def body(self) -> list[ast.stmt]:
        """The statements of a loop; a comprehension has none."""
        found = getattr(self.node, "body", [])
        return found if isinstance(found, list) else []


@dataclass(frozen=True)
class _Place:
    """Where a call is in its source: the nodes around that, outermost first, within its function."""

    file: str
    name: str
    path: list[_At]
    body: list[ast.stmt]
    """The statements of the function, or of the script."""
    before: list[ast.stmt]
    """Those before the place."""
    parameters: set[str]
    is_generator: bool
    is_function: bool

    def loop(self, node: Any) -> SourceLoop:
        """The name of a loop among all of the script's."""
        return SourceLoop(self.file, node.lineno, node.col_offset)


@functools.lru_cache(maxsize=1024)
def _place(file: str, code: CodeType, instruction: int) -> _Place | None:
    """Where an instruction of `code` comes from, or None if its source is not there.

    `file`: that of the code, because equal code of different files compares as equal.
    """
    tree = _tree(file)
    span = next(itertools.islice(code.co_positions(), max(instruction, 0) // 2, None), None)
    if tree is None or span is None or None in span:
        return None
    first, last, column, end = (int(number or 0) for number in span)
    chain: list[ast.AST] = [tree]
    while (inner := _child_around(chain[-1], (first, column), (last, end))) is not None:
        chain.append(inner)
    scope = max((i for i, node in enumerate(chain) if _is_scope(node, code)), default=0)
    within, function = chain[scope + 1 :], chain[scope]
    iterating = dis.opname[code.co_code[max(instruction, 0)]] in ("FOR_ITER", "SEND")
    if isinstance(function, _COMPREHENSIONS):
        within = [function, *within]
    path = []
    for node, inner in zip(within, [*within[1:], None]):
        source = _source_of(node)
        in_source = source is not None and (inner is source or inner is None)
        mine = iterating and in_source and not any(_source_of(n) for n in within[within.index(node) + 1 :])
        path.append(_At(node, not in_source and inner is not None, mine, _before(node, inner)))
    body = getattr(function, "body", [])
    body = body if isinstance(body, list) else []
    names = function.args if isinstance(function, _FUNCTIONS) else None
    parameters = {a.arg for a in ast.walk(names) if isinstance(a, ast.arg)} - {"self"} if names else set()
    before = _before(function, within[0] if within else None)
    return _Place(
        file,
        code.co_name,
        path,
        body,
        before,
        parameters,
        bool(code.co_flags & inspect.CO_GENERATOR),
        isinstance(function, _FUNCTIONS),
    )


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    source = "".join(linecache.getlines(file))
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError):
        return None


def _is_scope(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, _COMPREHENSIONS):
        return code.co_name in _NAMES_OF_COMPREHENSIONS
    return isinstance(node, (*_FUNCTIONS, ast.ClassDef))


def _child_around(node: ast.AST, begin: tuple[int, int], end: tuple[int, int]) -> ast.AST | None:
    for child in _children(node):
        if (child.lineno, child.col_offset) <= begin and end <= (child.end_lineno, child.end_col_offset):
            return child
    return None


def _children(node: ast.AST) -> Iterator[Any]:
    """The nodes below `node` that have a place in the source."""
    for child in ast.iter_child_nodes(node):
        if hasattr(child, "lineno"):
            yield child
        else:
            yield from _children(child)


def _before(node: ast.AST, inner: ast.AST | None) -> list[ast.stmt]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and inner in block:
            return block[: block.index(inner)]
    return []
