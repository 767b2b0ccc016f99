"""The description of an optimizer's parameters that ``describe`` returns."""

import csv
import dataclasses
import html
import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from orscale_jax.audit.certificate import Certificate
from orscale_jax.audit.plan import Group, Plan
from orscale_jax.parameters.expressions import matching
from orscale_jax.trees.names import merged

_NAMES_WIDTH = 72  # Of the names shown for a group, which are one at least.


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
      layer_class: The class of its layer, such as "attention key", by its name:
        :func:`orscale_jax.diagnostics.layer_classes`.
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
      blocks: How many blocks of one size lie along an axis of the leaf; 0 without such
        blocks.
      stride: How many entries of one block come before those of the next; 0 where blocks
        are contiguous.
      batch_shape: The batch shape of its matrices, such as layers × experts.
      mesh_axes: For each axis of its matrices ``(*batch, m, n)``, the axes of the mesh
        that it is sharded over; empty without a mesh and for other rules.
      check: Reasons to look at this leaf: it is named like a fused projection, a router,
        a table or a head; one side is at least 16 times as long as the other; a batch
        axis has length 1; it may be the output layer, because no name or trace shows
        one, and no length in the rest of the model fits its outputs (pass an example
        input to the function for the library, or a rule); why it is refused; or its
        master weights drift, because it is frozen outside of :func:`keep_master_weights`.
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
    layer_class: str = "other"
    label: str = ""
    why: str = ""
    matrices: int = 0
    m: int = 0
    n: int = 0
    scale: float | None = None
    norms: tuple[float, float] | None = None
    block: str = ""
    blocks: int = 0
    stride: int = 0
    batch_shape: tuple[int, ...] = ()
    mesh_axes: tuple[tuple[str, ...], ...] = ()
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
        """The rows as CSV, with the columns of the table except the norms.

        Write it to ``audit.csv`` in the folder of a run:
        ``python -m orscale_jax.diagnostics`` shows it in its report.
        """
        columns = []
        for column in _COLUMNS:
            values = [column.of_row(row) for row in self.rows]
            empty = {*values} <= {column.nothing, None}
            if column.csv and not (column.optional and empty):
                cells = (f"{x:.7g}" if isinstance(x, float) else x for x in values)
                columns.append([column.csv, *cells])
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows(zip(*columns, strict=True))
        return text.getvalue()

    def __str__(self) -> str:
        """The table with the columns that decide what to change."""
        return self.to_text(wide=False)

    __repr__ = __str__

    def to_text(self, *, wide: bool = True) -> str:
        """The table as text, with all columns that say anything.

        Args:
          wide: Whether it has the class, s, ‖W‖ and the number of entries of each
            parameter. ``print`` shows it without these. But it always shows ‖W‖ if the
            norm of a matrix is 0 or not finite.
        """
        rows, totals = _merged_rows(self.rows), self.totals
        hidden = {""} | {
            column.heading for column in _COLUMNS if column.wide and not wide
        }
        if len(dtypes := {row.dtype for row in self.rows}) == 1:
            hidden.add("dtype")
        if any(not 0 < norm < np.inf for row in rows for norm in row.norms or ()):
            hidden.discard("‖W‖")
        table = []
        for column in _COLUMNS:
            texts = [_text(column.of_row(row)) for row in rows]
            sums = [_text(column.of_total(*total)) for total in totals.items()]
            if column.heading not in hidden and {*texts, *sums} - {"", column.nothing}:
                width = max(map(len, (column.heading, *texts, *sums)))
                cells = (column.heading, "─" * width, *texts, "─" * width, *sums)
                table.append([f"{cell:{column.side}{width}}" for cell in cells])
        lines = ["  ".join(cells).rstrip() for cells in zip(*table, strict=True)]
        notes = [f"all parameters are {dtype}" for dtype in dtypes if len(dtypes) == 1]
        if (each := self.state_bytes_per_parameter) is not None:
            on_device = self.state_bytes_per_device
            told = "" if on_device is None else f", {on_device:,} bytes per device"
            notes.append(f"state: {each:.4g} bytes per parameter{told}")
        notes += [""] if notes else []
        notes += [f"refused: {error}\n" for error in self.refusals]
        alike: dict[str, dict[str, str]] = {}  # By name without numbers, then with them.
        for row in self.rows:
            # Integers are no parameters: nobody trains them.
            if row.rule == "refused" and row.dtype.kind not in "biu":
                real = row.check == ("ambiguous",)
                axes = "MuonDimensionNumbers(reduction_axis=..., output_axis=...)"
                rule = f"{axes},  # {row.shape}" if real else '"adamw",'
                path = re.escape(row.path)
                alike.setdefault(re.sub(r"\d+", r"\\d+", path), {})[path] = rule
        if alike:
            rules: dict[str, str] = {}
            for path, of_rows in alike.items():
                one_rule = len({*of_rows.values()}) == 1
                rules |= {path: min(of_rows.values())} if one_rule else of_rows
            written = (f'    r"^{path}$": {rule}' for path, rule in rules.items())
            notes += ["what to write:\nby_path({", *written, "})\n"]
        if self.mesh:
            notes.append(f"Newton–Schulz on {self.mesh}")
        elif self.plan.groups:
            notes.append("stacks for Newton–Schulz")
        if self.plan.is_traced:
            notes.append(
                "in its slow form: ns_steps or ns_coeffs is traced; if by "
                "optax.inject_hyperparams, name it in static_args"
            )
        notes += [_of_group(group, bool(self.mesh)) for group in self.plan.groups]
        notes += [_of_cost(self.plan)] if self.mesh and self.plan.groups else []
        notes += [] if self.certificate is None else ["", str(self.certificate)]
        return "\n".join([*lines, "", *notes]).rstrip()

    def _repr_html_(self) -> str:
        return f"<pre style='white-space: pre'>{html.escape(str(self))}</pre>"


class _Column(NamedTuple):
    """A column of the table: all that is to be said of it."""

    heading: str  # In print; empty for a column of the CSV file alone.
    csv: str  # Its heading there; empty for a column of the printed table alone.
    of_row: Callable[[ParameterRow], Any]
    of_total: Callable[[str, Total], Any] = lambda name, total: None
    side: str = ">"  # Where its cells are aligned.
    nothing: str = ""  # What says nothing: a column of nothing else is not shown.
    optional: bool = False  # Whether it is not in the file either.
    wide: bool = False  # Whether print leaves it out.


_COLUMNS = (
    _Column("parameter", "parameter", lambda row: row.name, lambda name, _: name, "<"),
    _Column(
        "shape", "shape", lambda row: str(row.shape),
        lambda name, total: ""
        if name == "shared"
        else f"{total.leaves:,} {'leaf' if total.leaves == 1 else 'leaves'}", "<",
    ),
    _Column("dtype", "dtype", lambda row: str(row.dtype), side="<"),
    _Column("rule", "rule", lambda row: row.rule, side="<"),
    _Column("why", "why", lambda row: row.why, side="<", optional=True),
    _Column("check", "check", lambda row: ", ".join(row.check), side="<"),
    _Column("label", "label", lambda row: row.label, side="<", optional=True),
    _Column(
        "first update", "first_update", lambda row: row.first_update, side="<",
        optional=True,
    ),
    _Column(
        "its RMS", "first_update_rms", lambda row: row.first_update_rms, optional=True
    ),
    _Column(
        "class", "class", lambda row: row.layer_class, side="<", nothing="other",
        wide=True,
    ),
    _Column(
        "blocks", "blocks",
        lambda row: (f"{row.blocks} in turns of {row.stride}" if row.stride
                     else f"{row.blocks} contiguous" if row.blocks else ""),
        optional=True,
    ),
    _Column(
        "matrices", "",
        lambda row: f"{row.matrices:,} of {row.m} × {row.n}" if row.matrices else None,
        lambda name, total: total.matrices if name in ("matrix", "all") else None, "<",
    ),
    _Column("", "matrices", lambda row: row.matrices),
    _Column("", "m", lambda row: row.m if row.matrices else None),
    _Column("", "n", lambda row: row.n if row.matrices else None),
    _Column("s", "s", lambda row: row.scale, wide=True),
    _Column(
        "‖W‖", "",
        lambda row: " … ".join(dict.fromkeys(f"{x:.4g}" for x in row.norms or ())),
        wide=True,
    ),
    _Column(
        "parameters", "parameters", lambda row: row.parameters,
        lambda name, total: None if name == "shared" else total.parameters, wide=True,
    ),
    _Column(
        "state bytes", "state_bytes", lambda row: row.state_bytes,
        lambda name, total: total.state_bytes,
    ),
)  # fmt: skip


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


def _merged_rows(rows: Sequence[ParameterRow]) -> list[ParameterRow]:
    """One row, of sums and extremes, for those that differ by numbers in their names."""
    keys = [
        dataclasses.replace(row, path="", norms=None, first_update_rms=None)
        for row in rows
    ]
    merged_rows = []
    for name, indexes in merged([row.name for row in rows], keys):
        members = [rows[index] for index in indexes]
        total, norms = _total(members), [x for row in members for x in row.norms or ()]
        sizes = [row.first_update_rms for row in members]
        squares = [row.parameters * (row.first_update_rms or 0) ** 2 for row in members]
        row = dataclasses.replace(
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
        merged_rows.append(row)
    return merged_rows


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
    entries = merged(group.names)
    widths = itertools.accumulate(len(name) + 2 for name, _ in entries)
    fitting = max(1, sum(width <= _NAMES_WIDTH for width in widths))
    more = sum(len(members) for _, members in entries[fitting:])
    names = ", ".join(name for name, _ in entries[:fitting])
    return f"{line}: {names}" + (f" and {more:,} more" if more else "")


def _of_cost(plan: Plan) -> str:
    """What a step costs each device, in one line: three digits, all before the point."""
    work, fast, slow, total, transfers, exposed = (
        f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
        for number in (
            plan.flops / 1e9, plan.fast_bytes / 1e6, plan.slow_bytes / 1e6,
            plan.seconds * 1e3, plan.transfer_seconds * 1e3, plan.exposed_seconds * 1e3,
        )
    )  # fmt: skip
    return (
        f"each device: {work} GFLOP, {fast} MB over fast links, {slow} MB over slow "
        f"ones; about {total} ms without overlap, {transfers} of them for transfers, at "
        f"least {exposed} waited for"
    )
