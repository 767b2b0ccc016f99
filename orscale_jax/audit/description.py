"""The description of an optimizer's parameters that ``describe`` returns."""

import csv
import dataclasses
import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from orscale_jax.audit.certificate import Certificate
from orscale_jax.audit.plan import Group, Plan
from orscale_jax.parameters.path_rules import matching
from orscale_jax.trees.names import merged

_NAMES = 6  # Shown for a group.


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One leaf of the parameters, or one of its blocks where these have several sizes.

    Attributes:
      path: The leaf's path, with dots.
      shape: Its shape, or that of the block.
      dtype: Its dtype.
      rule: ``"matrix"`` or ``"adamw"``, for the branches of this library's optimizers;
        ``"other"``, another optimizer; ``"stateless"``, none that keeps a state for it:
        :func:`optax.set_to_zero`, which freezes it, plain :func:`optax.sgd`, or none at
        all outside of :func:`optax.masked`, which passes the gradient on as the update;
        ``"refused"``, an error, until the optimizer gets dimension numbers for it.
      parameters: The number of its entries.
      state_bytes: Bytes of optimizer state that belong to it; None if it is refused.
      kind: What its name says: "embedding", "head", "norm", "scale", "bias" or
        "other".
      label: Its label in :func:`optax.partition`, such as ``"frozen"``; those of nested
        partitions are joined by ``/``. If several groups keep no state, the state does
        not tell which of them has a parameter: ``"frozen or sgd"``. Empty without a
        partition.
      why: What has decided on the rule ``"matrix"`` or ``"adamw"``: ``"rule"``, an
        expression of :func:`by_path` or of ``overrides``; ``"module"``, the type of its
        module; ``"output"``, the trace, in which its product is the model's output;
        ``"name"``, the names on its path; ``"shape"``, its number of axes; or
        ``"numbers"``, a tree of dimension numbers or a function of your own. Empty for
        other rules, and for an ``init`` that is compiled.
      matrices: How many matrices it holds; 0 for other rules, as for ``m`` and ``n``,
        and for a stack of which a compiled or mapped ``init`` does not tell the axes.
      m: Rows of each matrix.
      n: Columns of each matrix.
      scale: The factor s of Q; None for other rules.
      norms: Smallest and largest Frobenius norm of its matrices; None if it has no
        matrices, or no values (abstract, empty, or sharded over several processes).
      block: Where in the leaf the block lies, such as ``[:, 768:1024]``; empty for a
        whole leaf.
      blocks: Blocks of one size along an axis of the leaf, in words: ``"3 contiguous"``
        or ``"2 in turns of 128"`` entries; empty without such blocks.
      check: Reasons to look at this leaf: it is named like a fused projection, a router,
        a table or a head; one side is at least 16 times as long as the other; a batch
        axis has length 1; it may be the output layer, because no name or trace shows
        one, and no length in the rest of the model fits its outputs (pass an example
        input to the function for the library, or a rule); why it is refused; or its
        master weights drift, because something after :func:`keep_master_weights` freezes
        it or changes its update.
        Empty if there are none.
      first_update: With ``probe=True``, what the first update that is not zero does to
        it: ``"orthogonal"``, if the singular values of each matrix are equal, as far as
        Newton–Schulz makes them so (for another library's optimizer, of the matrices by
        any reading of the axes); ``"element-wise"``, if its entries are, as those of
        AdamW and of signs; ``"other"``; or ``"none"``, if it has not moved after 128
        updates by one gradient (16, if others have). Decay does not count.
      first_update_rms: The root mean square of that update over the whole leaf, with the
        weight decay.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: str
    parameters: int
    state_bytes: int | None = None
    kind: str = "other"
    label: str = ""
    why: str = ""
    matrices: int = 0
    m: int = 0
    n: int = 0
    scale: float | None = None
    norms: tuple[float, float] | None = None
    block: str = ""
    blocks: str = ""
    check: tuple[str, ...] = ()
    first_update: str = ""
    first_update_rms: float | None = None

    @property
    def name(self) -> str:
        """Path and block, as the table shows them."""
        return (self.path or "(the only leaf)") + self.block


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over rows; ``state_bytes`` is None if any of them is refused."""

    leaves: int
    matrices: int
    parameters: int
    state_bytes: int | None


@dataclasses.dataclass(frozen=True, repr=False)
class Description:
    """The parameters and the plan of an optimizer. ``print`` shows it as a table.

    ``print(description.to_text())`` shows the table with all columns.

    Attributes:
      rows: One :class:`ParameterRow` per leaf, in the order of the tree (one per block of
        a leaf whose blocks have several sizes).
      plan: What goes through Newton–Schulz together, on one device or on the mesh.
      shared_bytes: Bytes of optimizer state that belong to no leaf, such as counts.
      mesh: The lengths of the axes of the parameters' mesh, its slices, and where the
        optimizer finds the shardings, in words; empty without a mesh.
      state_bytes_per_device: Bytes of optimizer state on each device of the mesh, by
        :func:`state_shardings`; None without a mesh, in a selection, if a leaf is
        refused, and for an optimizer whose ``init`` does not run on Explicit axes.
      refusals: What the optimizer's errors will say of the leaves that it refuses.
      certificate: How the update on the mesh compares with that of one device; None
        without a mesh, without ``probe``, and in a selection.
    """

    rows: tuple[ParameterRow, ...]
    plan: Plan
    shared_bytes: int = 0
    mesh: str = ""
    state_bytes_per_device: int | None = None
    refusals: tuple[str, ...] = ()
    certificate: Certificate | None = None

    @property
    def totals(self) -> dict[str, Total]:
        """``leaves``, ``matrices``, ``parameters`` and ``state_bytes`` of each rule.

        ``"other"``, ``"stateless"`` and ``"refused"`` are there only if rows have them.
        ``"shared"`` is the state that belongs to no leaf, ``"all"`` the sum of all.
        """
        rows_of: dict[str, list[ParameterRow]] = {"matrix": [], "adamw": []}
        for row in self.rows:
            rows_of.setdefault(row.rule, []).append(row)
        return {
            **{rule: _total(rows) for rule, rows in rows_of.items()},
            "shared": Total(0, 0, 0, self.shared_bytes),
            "all": _total(self.rows, self.shared_bytes),
        }

    @property
    def state_bytes_per_parameter(self) -> float | None:
        """Bytes of optimizer state per entry; None without entries or with refusals."""
        total = self.totals["all"]
        if total.state_bytes is None or not total.parameters:
            return None
        return total.state_bytes / total.parameters

    def select(self, expression: str) -> "Description":
        """Select the rows in whose paths :func:`re.search` finds the expression.

        The plan is still that of all rows, of which it keeps the groups that hold a
        selected one. A ValueError says that no path has a match.
        """
        paths = matching("expression", expression, [row.path for row in self.rows])
        rows = tuple(row for row in self.rows if row.path in paths)
        names = {row.name for row in rows}
        groups = (group for group in self.plan.groups if names.intersection(group.names))
        return Description(
            rows,
            self.plan._replace(groups=tuple(groups)),
            mesh=self.mesh,
            refusals=self.refusals,
        )

    def to_csv(self) -> str:
        """The rows as CSV, with a column for each attribute of :class:`ParameterRow`.

        ``python -m examples.report`` shows the file ``audit.csv`` of a run's folder.
        """
        names = [field.name for field in dataclasses.fields(ParameterRow)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow(vars(row) | {"check": ", ".join(row.check)})
        return text.getvalue()

    def __str__(self) -> str:
        """The table with the columns that decide what to change."""
        return self.to_text(wide=False)

    __repr__ = __str__

    def to_text(self, *, wide: bool = True) -> str:
        """The table as text, with all columns that say anything.

        Args:
          wide: Whether it has the kind, s, ‖W‖ and the number of entries of each
            parameter. ``print`` shows it without these. But it always shows ‖W‖ if the
            norm of a matrix is 0 or not finite.
        """
        notes = []
        if len(dtypes := {row.dtype for row in self.rows}) == 1:
            notes.append(f"all parameters are {min(dtypes)}")
        if (each := self.state_bytes_per_parameter) is not None:
            line = f"state: {each:.4g} bytes per parameter"
            if self.state_bytes_per_device is not None:
                line += f", {self.state_bytes_per_device:,} bytes per device"
            notes.append(line)
        paragraphs = [
            _table(self.rows, self.totals, wide),
            "\n".join(notes),
            *(f"refused: {error}" for error in self.refusals),
            _what_to_write(self.rows),
            _of_plan(self.plan, self.mesh),
            "" if self.certificate is None else str(self.certificate),
        ]
        return "\n\n".join(filter(None, paragraphs))

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre'>{html.escape(str(self))}</pre>"


# The columns of the printed table: their headings, and what they show of a row.
_COLUMNS: dict[str, Callable[[ParameterRow], Any]] = {
    "parameter": lambda row: row.name,
    "shape": lambda row: str(row.shape),
    "dtype": lambda row: str(row.dtype),
    "rule": lambda row: row.rule,
    "why": lambda row: row.why,
    "check": lambda row: ", ".join(row.check),
    "label": lambda row: row.label,
    "first update": lambda row: row.first_update,
    "its RMS": lambda row: row.first_update_rms,
    "kind": lambda row: row.kind,
    "blocks": lambda row: row.blocks,
    "matrices": lambda row: (
        f"{row.matrices:,} of {row.m} × {row.n}" if row.matrices else None
    ),
    "s": lambda row: row.scale,
    "‖W‖": lambda row: " … ".join(dict.fromkeys(f"{x:.4g}" for x in row.norms or ())),
    "parameters": lambda row: row.parameters,
    "state bytes": lambda row: row.state_bytes,
}
_WIDE = {"kind", "s", "‖W‖", "parameters"}  # Which print leaves out.


def _table(rows: Sequence[ParameterRow], totals: dict[str, Total], wide: bool) -> str:
    """The columns that say anything, with the sums below them."""
    lines, shown = [*_merged_rows(rows)], dict(_COLUMNS)
    if len({row.dtype for row in rows}) == 1:
        del shown["dtype"]  # A note says it.
    if not wide:
        odd = any(not 0 < norm < np.inf for row in lines for norm in row.norms or ())
        for heading in _WIDE - ({"‖W‖"} if odd else set()):
            del shown[heading]
    columns = []
    for heading, of_row in shown.items():
        values = [of_row(row) for row in lines]
        sums = [_sums(name, total).get(heading) for name, total in totals.items()]
        cells = [*map(_text, values), "", *map(_text, sums)]
        if {*cells} - {"", "other" if heading == "kind" else ""}:
            side = "<" if any(isinstance(x, str) and x for x in values) else ">"
            width = max(map(len, (heading, *cells)))
            cells[len(lines)] = "─" * width
            cells = [heading, "─" * width, *cells]
            columns.append([f"{cell:{side}{width}}" for cell in cells])
    return "\n".join("  ".join(x).rstrip() for x in zip(*columns, strict=True))


def _sums(name: str, total: Total) -> dict[str, Any]:
    """What the line of a rule shows, by heading."""
    sums: dict[str, Any] = {"parameter": name, "state bytes": total.state_bytes}
    if name != "shared":
        sums["shape"] = f"{total.leaves:,} {'leaf' if total.leaves == 1 else 'leaves'}"
        sums["parameters"] = total.parameters
    if name in ("matrix", "all"):
        sums["matrices"] = total.matrices
    return sums


def _what_to_write(rows: Sequence[ParameterRow]) -> str:
    """Rules for the leaves that are refused, of which alike ones share an expression."""
    axes = "MuonDimensionNumbers(reduction_axis=..., output_axis=...)"
    alike: dict[str, dict[str, str]] = {}  # Rules by path, by path without numbers.
    for row in rows:
        if row.rule == "refused" and row.dtype.kind not in "biu":  # Not integers.
            path, rule = re.escape(row.path), '"adamw",'
            if row.check == ("ambiguous",):
                rule = f"{axes},  # {row.shape}"
            alike.setdefault(re.sub(r"\d+", r"\\d+", path), {})[path] = rule
    lines = []
    for expression, rules in alike.items():
        if len({*rules.values()}) == 1:
            rules = {expression: min(rules.values())}
        lines += [f'    r"^{path}$": {rule}' for path, rule in rules.items()]
    return "\n".join(["what to write:", "by_path({", *lines, "})"]) if lines else ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _total(rows: Sequence[ParameterRow], shared_bytes: int = 0) -> Total:
    """The sums over some rows, and bytes that belong to none."""
    state_bytes = [row.state_bytes for row in rows if row.state_bytes is not None]
    known = len(state_bytes) == len(rows)
    return Total(
        leaves=len({row.path for row in rows}),
        matrices=sum(row.matrices for row in rows),
        parameters=sum(row.parameters for row in rows),
        state_bytes=sum(state_bytes) + shared_bytes if known else None,
    )


def _merged_rows(rows: Sequence[ParameterRow]) -> Iterator[ParameterRow]:
    """One row, of sums and extremes, for those that differ by numbers in their names."""
    keys = [
        dataclasses.replace(row, path="", norms=None, first_update_rms=None)
        for row in rows
    ]
    for name, indexes in merged([row.name for row in rows], keys):
        members = [rows[index] for index in indexes]
        total, norms = _total(members), [x for row in members for x in row.norms or ()]
        sizes = [row.first_update_rms for row in members]
        squares = [row.parameters * (row.first_update_rms or 0) ** 2 for row in members]
        yield dataclasses.replace(
            members[0],
            path=name,
            block="",
            matrices=total.matrices,
            # NumPy's, so that no NaN is lost.
            norms=(float(np.min(norms)), float(np.max(norms))) if norms else None,
            first_update_rms=None
            if None in sizes
            else (sum(squares) / max(1, total.parameters)) ** 0.5,
            parameters=total.parameters,
            state_bytes=total.state_bytes,
        )


def _of_plan(plan: Plan, mesh: str) -> str:
    """The groups, and on a mesh what a step costs."""
    if not plan.groups:
        return ""
    lines = [f"Newton–Schulz on {mesh}" if mesh else "stacks for Newton–Schulz"]
    if plan.is_traced:
        lines.append(
            "in its slow form: ns_steps or ns_coeffs is traced; if by "
            "optax.inject_hyperparams, name it in static_args"
        )
    lines += [_of_group(group, bool(mesh)) for group in plan.groups]
    return "\n".join([*lines, _of_cost(plan)] if mesh else lines)


def _of_group(group: Group, on_mesh: bool) -> str:
    """The matrices, devices, bytes and first names of a group, in one line."""
    line = " and ".join(f"{count:,} of {m} × {n}" for count, m, n, _ in group.matrices)
    if on_mesh:
        several = group.devices > 1
        line += f" over {group.devices} devices, " if several else " on each device, "
        line += " or ".join(
            f"{shared} to one" if shared > 1 else f"{group.matrices_per_device} each"
            for *_, shared in group.matrices
        )
        line += f", {group.bytes_sent:,} bytes sent per device"
        slow = group.slow_bytes_sent
        line += f", {slow:,} of them to other slices" if slow else ""
    entries = [name for name, _ in merged(group.names)]
    more = f" and {len(entries) - _NAMES} more" * (len(entries) > _NAMES)
    return f"{line}: {', '.join(entries[:_NAMES])}{more}"


def _of_cost(plan: Plan) -> str:
    """What a step costs each device, in one line: three digits, all before the point."""
    work, fast, slow, total, transfers = (
        f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
        for number in (
            plan.flops / 1e9, plan.fast_bytes / 1e6, plan.slow_bytes / 1e6,
            plan.seconds * 1e3, plan.transfer_seconds * 1e3,
        )
    )  # fmt: skip
    return (
        f"each device: {work} GFLOP, {fast} MB over fast links, {slow} MB over slow "
        f"ones; about {total} ms without overlap, {transfers} of them for transfers"
    )
