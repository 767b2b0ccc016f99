"""Names that differ only by numbers, such as those of layers, as one name."""

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

_NUMBER = re.compile(r"([0-9]+)")
_BLOCK = re.compile(r"(\[[^\[]*\])$")  # The place of a block in its leaf.

# For each place of a number in a name, the numbers that stand there.
_Numbers: TypeAlias = tuple[frozenset[str], ...]


class Merged(NamedTuple):
    """Entries that differ only by numbers in their names.

    Attributes:
      name: Their name, with ``*`` for all numbers that any entry has in that place, and
        ``{1-3,7}`` for some of them.
      members: The indexes of the entries.
    """

    name: str
    members: list[int]


class _Group(NamedTuple):
    """Entries of one text and key, with every combination of some numbers."""

    text: tuple[str, ...]
    key: Hashable
    numbers: _Numbers
    members: list[int]


def merged(names: Sequence[str], keys: Sequence[Hashable]) -> list[Merged]:
    """Merge the entries that have equal keys and, but for numbers, equal names.

    The merged name stands for every combination of its numbers, and for nothing else.

    Args:
      names: The names of the entries, such as ``blocks.0.up``.
      keys: What else must be equal.

    Returns:
      The merged entries, in the order of their first members.
    """
    groups = [
        _alone(*entry, index) for index, entry in enumerate(zip(names, keys, strict=True))
    ]
    every = defaultdict(list)
    for group in groups:
        every[group.text].append(group.numbers)
    numbers_of = {text: _union(numbers) for text, numbers in every.items()}
    # The last places first: where layers have other experts, the layers stay apart.
    for place in reversed(range(max((len(g.numbers) for g in groups), default=0))):
        groups = _merged_at(place, groups)
    groups.sort(key=lambda group: group.members[0])
    return [
        Merged(_name(group, numbers_of[group.text]), group.members) for group in groups
    ]


def counted(name: str, count: int) -> str:
    """A name, and how many entries it stands for unless that is one."""
    return name if count == 1 else f"{name} × {count:,}"


def _alone(name: str, key: Hashable, index: int) -> _Group:
    path, *block = _BLOCK.split(name)
    texts = _NUMBER.split(path)
    numbers = tuple(frozenset({number}) for number in texts[1::2])
    return _Group((*texts[::2], *block), key, numbers, [index])


def _merged_at(place: int, groups: Iterable[_Group]) -> list[_Group]:
    """Merge the groups that differ only by the numbers in one place."""
    alike = defaultdict(list)
    for group in groups:
        others = group.numbers[:place] + group.numbers[place + 1 :]
        alike[group.text, group.key, others].append(group)
    return [
        _Group(
            text,
            key,
            _union([part.numbers for part in parts]),
            sorted(itertools.chain(*(part.members for part in parts))),
        )
        for (text, key, _), parts in alike.items()
    ]


def _union(numbers: Iterable[_Numbers]) -> _Numbers:
    """All numbers of several names, place by place."""
    return tuple(frozenset[str]().union(*sets) for sets in zip(*numbers, strict=True))


def _name(group: _Group, every: _Numbers) -> str:
    places = (
        "*" if 1 < len(own) == len(known) else _ranges(own)
        for own, known in zip(group.numbers, every, strict=True)
    )
    pairs = itertools.zip_longest(group.text, places, fillvalue="")
    return "".join(itertools.chain(*pairs))


def _ranges(numbers: frozenset[str]) -> str:
    """Such as ``3``, ``{0-3}`` or ``{0,2,4-6}``."""
    if len(numbers) == 1:
        return min(numbers)
    ordered = sorted(numbers, key=lambda number: (int(number), number))
    # In a run of successive numbers, the number less its index is constant.
    runs = itertools.groupby(
        enumerate(ordered),
        key=lambda indexed: (int(indexed[1]) - indexed[0], _zeros(indexed[1])),
    )
    ends = ([number for _, number in run] for _, run in runs)
    listed = ",".join("-".join(dict.fromkeys((run[0], run[-1]))) for run in ends)
    return f"{{{listed}}}"


def _zeros(number: str) -> int:
    """The width of a number that begins with zeros, 0 for others."""
    return len(number) if number != str(int(number)) else 0
