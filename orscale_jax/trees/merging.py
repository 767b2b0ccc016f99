"""Names that differ only by numbers, such as those of layers, as one name."""

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

_NUMBER = re.compile(r"([0-9]+)")
_BLOCK = re.compile(r"(\[[^\[]*\])$")  # The place of a block in its leaf.

# For each place of a number in a name, the numbers that stand there.
_Numbers: TypeAlias = tuple[frozenset[str], ...]


def merged(
    names: Sequence[str], keys: Sequence[Hashable] | None = None
) -> list[tuple[str, list[int]]]:
    """The names and indexes of entries with equal keys and, but for numbers, names.

    A merged name stands for every combination of its numbers, and for nothing else. It
    has ``*`` for all numbers that any entry has in a place, ``{1-3,7}`` for some of them,
    and says how many entries it stands for: ``blocks.*.up × 12``.
    """
    groups: list[tuple[Any, Any, _Numbers, list[int]]] = []
    for index, name in enumerate(names):
        path, *block = _BLOCK.split(name)
        texts = _NUMBER.split(path)
        numbers = tuple(frozenset({number}) for number in texts[1::2])
        key = None if keys is None else keys[index]
        groups.append(((*texts[::2], *block), key, numbers, [index]))
    known: dict[tuple[str, ...], _Numbers] = {}
    for text, _, numbers, _ in groups:
        known[text] = _union([known.get(text, numbers), numbers])
    # The last places first: where layers have other experts, the layers stay apart.
    for place in reversed(range(max(map(len, known.values()), default=0))):
        alike: dict[Any, list[tuple[_Numbers, list[int]]]] = {}
        for text, key, numbers, members in groups:
            others = numbers[:place] + numbers[place + 1 :]
            alike.setdefault((text, key, others), []).append((numbers, members))
        groups = [
            (
                text,
                key,
                _union([numbers for numbers, _ in parts]),
                sorted(itertools.chain(*(members for _, members in parts))),
            )
            for (text, key, _), parts in alike.items()
        ]
    merged_names = []
    for text, _, numbers, members in sorted(groups, key=lambda group: group[3]):
        places = (
            "*" if 1 < len(numbers_of_name) == len(every) else _ranges(numbers_of_name)
            for numbers_of_name, every in zip(numbers, known[text], strict=True)
        )
        pairs = itertools.zip_longest(text, places, fillvalue="")
        count = f" × {len(members):,}" if len(members) > 1 else ""
        merged_names.append(("".join(itertools.chain(*pairs)) + count, members))
    return merged_names


def _union(numbers: Iterable[_Numbers]) -> _Numbers:
    """All numbers of several names, place by place."""
    return tuple(frozenset[str]().union(*sets) for sets in zip(*numbers, strict=True))


def _ranges(numbers: frozenset[str]) -> str:
    """Such as ``3``, ``{0-3}`` or ``{0,2,4-6}``."""
    if len(numbers) == 1:
        return min(numbers)
    ordered = sorted(numbers, key=lambda number: (int(number), number))
    # In a run of successive numbers, the number less its index is constant, and the width
    # of those that begin with zeros.
    runs = itertools.groupby(
        enumerate(ordered),
        key=lambda at: (int(at[1]) - at[0], at[1] != str(int(at[1])) and len(at[1])),
    )
    ends = ([number for _, number in run] for _, run in runs)
    listed = ",".join("-".join(dict.fromkeys((run[0], run[-1]))) for run in ends)
    return f"{{{listed}}}"
