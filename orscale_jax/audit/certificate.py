"""Whether an update on a mesh is that of one device, and what its program sends."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orscale_jax.audit import hlo
from orscale_jax.audit.causes import Array, Difference, cause_of
from orscale_jax.audit.probe import draw, runnable
from orscale_jax.audit.program import collectives, flops_of
from orscale_jax.audit.state import leaves_by_path
from orscale_jax.parameters.axes import MatrixAxes
from orscale_jax.sharding import typed_sharding
from orscale_jax.trees.boxes import PyTree, trained, unbox
from orscale_jax.trees.merging import merged
from orscale_jax.trees.names import distinct_names

# An optimizer that closes over a mesh is made again for one device.
Optimizer: TypeAlias = (
    optax.GradientTransformation | Callable[[Mesh], optax.GradientTransformation]
)

# How often gradients are given until a parameter moves; after the last one that has
# moved, the others get fewer. Two updates of each are compared: the second has momentum.
_UPDATES, _MORE_UPDATES, _COMPARED = 128, 4, 2
# Rounding in float32 moves a polar factor by some 1e-4. In other dtypes it is measured,
# by gradients that are rounded otherwise.
_TOLERANCE, _ROUNDINGS = 1e-3, 8


class Sent(NamedTuple):
    """Collectives of one kind in the compiled program of an update.

    Attributes:
      kind: Such as ``"all-gather"``.
      times: How often they run.
      nbytes: The bytes that each device sends by them.
      looped: Whether they are inside of a loop, so that they cannot be merged.
    """

    kind: str
    times: int
    nbytes: int
    looped: bool


class CertificateRow(NamedTuple):
    """How far an update on a mesh is from that of one device, for one parameter.

    Attributes:
      path: The parameter's path, with dots.
      error: The norm of the difference over the norm of the update on one device, of the
        worst matrix, in float32.
      error_in_dtypes: The same in the parameters' own dtypes; None if all are float32.
      cause: The likely cause of a difference beyond rounding; empty if there is none.
    """

    path: str
    error: float
    error_in_dtypes: float | None = None
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """How an update on a mesh compares with that of one device. ``print`` shows a table.

    Attributes:
      mesh: The mesh on which the updates ran, in words.
      rows: One :class:`CertificateRow` per parameter.
      sent: One :class:`Sent` for each kind of collective in the program of an update.
      flops: The FLOPs of matrix products on each device in one update.
      repetition: Those of all devices over those of one device alone: 1 if no product is
        repeated; None if there are no products.
      temporary_bytes: Bytes of temporary arrays on each device, as the compiler says.
      refusal: Why the updates could not be compared; empty if they were.
    """

    mesh: str
    rows: tuple[CertificateRow, ...] = ()
    sent: tuple[Sent, ...] = ()
    flops: int = 0
    repetition: float | None = None
    temporary_bytes: int = 0
    refusal: str = ""

    @property
    def same(self) -> bool:
        """Whether the updates were compared, and all are those of one device."""
        return not self.refusal and not any(row.cause for row in self.rows)

    @property
    def bytes_sent(self) -> int:
        """The bytes that each device sends in one update."""
        return sum(sent.nbytes for sent in self.sent)

    @property
    def looped_bytes(self) -> int:
        """The part of these bytes that is sent inside of loops."""
        return sum(sent.nbytes for sent in self.sent if sent.looped)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.refusal:
            return f"not compared on {self.mesh}: {self.refusal}"
        wrong = sum(bool(row.cause) for row in self.rows)
        all_rows = f"{len(self.rows)} parameters"
        told = f"NOT the update of one device, for {wrong} of {all_rows}"
        if self.same:
            told = f"the update of one device, for all {all_rows}"
        worst = max((row.error for row in self.rows), default=0.0)
        return f"on {self.mesh}: {told} (largest relative error {worst:.1e})"

    def __str__(self) -> str:
        """The verdict, the parameters, and what the program sends and multiplies."""
        if self.refusal:
            return self.verdict
        table = [("parameter", "error", "in its dtype", "cause of the difference")]
        names = [row.path or "(the only leaf)" for row in self.rows]
        for name, members in merged(names, [row.cause for row in self.rows]):
            rows = [self.rows[i] for i in members]
            own = [x.error_in_dtypes for x in rows if x.error_in_dtypes is not None]
            narrow = f"{max(own):.1e}" if own else ""
            table.append(
                (name, f"{max(x.error for x in rows):.1e}", narrow, rows[0].cause)
            )
        columns = [column for column in zip(*table, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            "  ".join(map(str.ljust, line, widths)).rstrip()
            for line in zip(*columns, strict=True)
        ]
        kinds = [
            f"{x.nbytes:,} by {x.times:,} × {x.kind}{' in loops' * x.looped}"
            for x in self.sent
        ]
        lines.append(
            f"each device: {self.bytes_sent:,} bytes sent"
            + (f" ({', '.join(kinds)})" if kinds else "")
            + f", {self.temporary_bytes:,} bytes of temporaries, "
            f"{self.flops / 1e9:.3g} GFLOP"
        )
        if self.repetition is not None:
            lines[-1] += f", together {self.repetition:.3g} × those of one device"
        return "\n".join([self.verdict, *lines])


def assert_same_on(
    mesh: Mesh | AbstractMesh, optimizer: Optimizer, params: PyTree
) -> Certificate:
    """Raise an AssertionError unless the update on a mesh is that of one device.

    It is a line for a test. The optimizer runs on the mesh and on one device, by the same
    random weights and gradients, until it has moved each parameter twice. The parameters
    are compared matrix by matrix: once in float32, and again in their own dtypes.

    Args:
      mesh: The mesh. If its devices are not there, as on an abstract mesh, devices that
        are there take their places, and the axes are shortened until there are enough.
      optimizer: Any Optax optimizer. If it closes over a mesh, pass the function that
        makes it from a mesh instead, such as ``lambda mesh: muon(1e-3, mesh=mesh)``.
      params: The parameters, which may be abstract; their values are not used. If they
        have a :class:`jax.sharding.NamedSharding`, its spec counts. Others are sharded
        over all axes of the mesh that divide theirs.

    Returns:
      The :class:`Certificate`, which also tells what the program sends.

    Raises:
      AssertionError: If an update differs by more than rounding. The message has the
        parameters, the errors, and the likely causes.
      ValueError: If the optimizer does not run, or there is only one device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from orscale_jax import assert_same_on, muon
      >>> mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), devices=jax.devices()[:8])
      >>> params = {"up": jnp.zeros((16, 32)), "bias": jnp.zeros(32)}
      >>> certificate = assert_same_on(mesh, muon(1e-3), params)
      >>> certificate.looped_bytes
      0
    """
    params = trained(params, optimizer)

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        known = isinstance(sharding, NamedSharding)
        spec = sharding.spec if known else _spread(np.shape(leaf), mesh)
        return jax.ShapeDtypeStruct(
            np.shape(leaf), jnp.result_type(leaf), sharding=NamedSharding(mesh, spec)
        )

    certificate = certify(optimizer, jax.tree.map(placed, params), mesh, {})
    if certificate.refusal:
        raise ValueError(certificate.verdict)
    if not certificate.same:
        raise AssertionError(str(certificate))
    return certificate


def _spread(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """A spec by which each axis of the mesh cuts the longest axis that it divides."""
    left = list(shape)
    names: list[tuple[str, ...]] = [() for _ in shape]
    for name, length in mesh.shape.items():
        divided = [axis for axis, size in enumerate(left) if size and not size % length]
        if divided:
            axis = max(divided, key=left.__getitem__)
            left[axis] //= length
            names[axis] += (name,)
    return PartitionSpec(*(x or None for x in names))


def certify(
    optimizer: Optimizer,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    axes_of: Mapping[Any, MatrixAxes],
) -> Certificate:
    """Compare updates on a mesh with those of one device: see :func:`assert_same_on`."""
    running = running_mesh(mesh)
    words = " × ".join(f"{size} {name}" for name, size in running.shape.items())
    leaves, structure = jax.tree.flatten(params)
    paths = [*leaves_by_path(unbox(params))]
    names = distinct_names(paths)
    readings = [
        axes_of.get(path) or _last_axes(np.ndim(leaf))
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    specs = [
        x.spec if isinstance(x, NamedSharding) else PartitionSpec() for x in shardings
    ]
    first = running.devices.ravel()[:1].reshape((1,) * running.devices.ndim)
    single = Mesh(first, running.axis_names, axis_types=running.axis_types)
    own = [jnp.result_type(leaf) for leaf in leaves]
    wide = [
        jnp.promote_types(x, jnp.float32) if jnp.issubdtype(x, jnp.inexact) else x
        for x in own
    ]

    def compared(dtypes: Sequence[Any], is_rounded: bool) -> _Comparison:
        weights, *grads = (
            [
                np.asarray(draw(np.shape(leaf), dtype, None)(3 * i + seed, size))
                for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
            ]
            for seed, size in enumerate((0.02, 1.0, 1.0))
        )
        chains = (_Chain(optimizer, x, structure, specs) for x in (running, single))
        comparison = _Comparison(*chains, weights, grads)
        comparison.run(readings, is_rounded)
        return comparison

    try:
        # As accelerators multiply float32.
        in_float32 = compared(wide, running.devices.flat[0].platform != "cpu")
        in_dtypes = in_float32 if own == wide else compared(own, True)
    except _NotOnOneDevice as error:
        return Certificate(words, refusal=str(error))
    rows = []
    for i, name in enumerate(names):
        cause = in_float32.cause(i, names)
        if i in in_dtypes.differences:
            cause = cause or "only in the parameters' dtypes: a cast, or a narrow sum"
        narrow = None if own == wide else in_dtypes.errors[i]
        rows.append(CertificateRow(name, in_float32.errors[i], narrow, cause))
    # A mesh may be there to compile for it only.
    target = mesh if isinstance(mesh, Mesh) else running
    program = in_float32.on_mesh.compiled_for(target)
    issued, alone = (
        [*hlo.runs(*hlo.parse(x.as_text() or ""))]
        for x in (program, in_float32.on_one.program)
    )
    sent: dict[tuple[str, bool], Sent] = {}
    for x in collectives(issued):
        _, times, nbytes, _ = sent.get((x.kind, x.looped), Sent(x.kind, 0, 0, x.looped))
        nbytes += x.sent(target.size)
        sent[x.kind, x.looped] = Sent(x.kind, times + x.times, nbytes, x.looped)
    flops, flops_alone = (sum(map(flops_of, x)) for x in (issued, alone))
    memory = program.memory_analysis()
    return Certificate(
        words,
        tuple(rows),
        tuple(sent.values()),
        flops,
        target.size * flops / flops_alone if flops_alone else None,
        0 if memory is None else memory.temp_size_in_bytes,
    )


def running_mesh(mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh, or one of devices that are there, with shorter axes if need be."""
    devices = jax.devices()
    if isinstance(mesh, Mesh) and {*mesh.devices.flat} <= {*devices}:
        return mesh
    sizes = list(mesh.axis_sizes)
    while math.prod(sizes) > len(devices):
        longest = sizes.index(max(sizes))
        sizes[longest] //= next(n for n in itertools.count(2) if not sizes[longest] % n)
    if math.prod(sizes) == 1 < mesh.size:
        raise ValueError(
            f"the optimizer has to run on a mesh like {dict(mesh.shape)}, but there is "
            "one device: call jax.config.update('jax_num_cpu_devices', 8) before JAX "
            "starts."
        )
    chosen = np.array(devices[: math.prod(sizes)]).reshape(sizes)
    return Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types)


def on_running_mesh(leaf: Any) -> Any:
    """A leaf of a mesh whose devices are not there, on those that are."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(leaf, jax.Array):
        return leaf
    moved = NamedSharding(running_mesh(sharding.mesh), sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved)


def _last_axes(rank: int) -> MatrixAxes:
    """The last two axes as a matrix, or the axis of a vector."""
    axes = (*range(rank),)
    return MatrixAxes(axes[:-2], axes[-2:-1], axes[-1:])


class _NotOnOneDevice(Exception):
    """An optimizer that runs on a mesh does not run on one device."""


class _Chain:
    """An optimizer on a mesh, compiled once for parameters of one type."""

    def __init__(
        self, optimizer: Any, mesh: Mesh, structure: Any, specs: Sequence[PartitionSpec]
    ) -> None:
        self.optimizer, self.mesh = optimizer, mesh
        self.structure, self.specs = structure, specs
        self.arguments: Any = None
        self.program: Any = None

    def updates(
        self, weights: Sequence[Array], grads: Sequence[Sequence[Array]]
    ) -> Iterator[list[jax.Array]]:
        """The leaves of each update, by gradients in turn; the weights do not change."""
        with jax.set_mesh(self.mesh):
            params, *gradients = map(self._placed, (weights, *grads))
            optimizer = self._made_for(self.mesh)
            state = jax.tree.map(
                lambda x: (
                    x
                    if isinstance(getattr(x, "sharding", None), NamedSharding)
                    else jax.device_put(x, NamedSharding(self.mesh, PartitionSpec()))
                ),
                optimizer.init(params),
            )
        for gradient in itertools.cycle(gradients):
            with jax.set_mesh(self.mesh):
                if self.program is None:
                    self.arguments = gradient, state, params
                    self.program = self._compiled(optimizer, *self.arguments)
                try:
                    updates, state = self.program(gradient, state, params)
                except (TypeError, ValueError):  # The types of the state have changed.
                    program = self._compiled(optimizer, gradient, state, params)
                    updates, state = program(gradient, state, params)
            yield jax.tree.leaves(updates)

    def compiled_for(self, mesh: Mesh) -> Any:
        """The program of an update on a mesh with these axes."""
        if mesh == self.mesh:
            return self.program
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
            ),
            self.arguments,
        )
        with jax.set_mesh(mesh):
            return self._compiled(self._made_for(mesh), *arguments)

    def _made_for(self, mesh: Mesh) -> Any:
        known = hasattr(self.optimizer, "update")
        return self.optimizer if known else self.optimizer(mesh)

    def _placed(self, arrays: Sequence[Array]) -> PyTree:
        placed = [
            jax.make_array_from_callback(
                x.shape, NamedSharding(self.mesh, spec), x.__getitem__
            )
            for x, spec in zip(arrays, self.specs, strict=True)
        ]
        return jax.tree.unflatten(self.structure, placed)

    def _compiled(self, optimizer: Any, grads: Any, state: Any, params: Any) -> Any:
        where = jax.tree.map(lambda x: x.sharding, (params, state))
        update = jax.jit(runnable(optimizer, grads, state, params), out_shardings=where)
        return update.lower(grads, state, params).compile()


class _Comparison:
    """Updates on a mesh and on one device, by the same gradients."""

    def __init__(
        self,
        on_mesh: _Chain,
        on_one: _Chain,
        weights: Sequence[Array],
        grads: Sequence[Sequence[Array]],
    ) -> None:
        self.on_mesh, self.on_one = on_mesh, on_one
        self.weights, self.grads = weights, grads
        self.errors = [0.0] * len(weights)
        #: Of a leaf that differs: the step, its updates, all updates of one device.
        self.differences: dict[int, tuple[int, Difference, list[Array]]] = {}
        self._instead: dict[tuple[Any, int], list[Array]] = {}

    def run(self, readings: Sequence[MatrixAxes], is_rounded: bool) -> None:
        """Compare two updates of each leaf that moves."""
        on_mesh = self.on_mesh.updates(self.weights, self.grads)
        on_one = self.on_one.updates(self.weights, self.grads)
        rng = np.random.default_rng(0)
        nudged = [
            [
                (x * (1 + rng.choice((-1, 1), x.shape) / 256)).astype(x.dtype)
                for x in grads
            ]
            for grads in self.grads
        ]
        rounded = self.on_one.updates(self.weights, nudged)
        noise, moved, left = [0.0] * len(readings), [0] * len(readings), _UPDATES
        for step in range(_UPDATES):
            found = next(on_mesh)
            try:
                wanted = [_wide(x) for x in next(on_one)]
            except Exception as error:  # Whatever a foreign update raises.
                raise _NotOnOneDevice(
                    f"the optimizer raises {type(error).__name__} on one device: "
                    f"{error}\nIf it closes over a mesh, call assert_same_on with the "
                    "function that makes it from a mesh."
                ) from error
            others = [_wide(x) for x in next(rounded)] if is_rounded else wanted
            for i, axes in enumerate(readings):
                one = wanted[i]
                off = np.zeros(one.shape)
                for shard in found[i].addressable_shards:
                    apart = abs(_wide(shard.data) - one[shard.index])
                    off[shard.index] = np.maximum(off[shard.index], apart)
                error = _relative(off, one, axes)
                noise[i] = max(noise[i], _relative(abs(others[i] - one), one, axes))
                self.errors[i] = max(self.errors[i], error)
                if error > max(_TOLERANCE, _ROUNDINGS * noise[i]):
                    difference = self._difference(found[i], one)
                    self.differences.setdefault(i, (step, difference, wanted))
                if one.any() or off.any():
                    left = left if moved[i] else _MORE_UPDATES + 1
                    moved[i] += 1
            left -= 1
            if not left or min(moved, default=_COMPARED) >= _COMPARED:
                break

    def _difference(self, update: jax.Array, wanted: Array) -> Difference:
        shards = [
            (str(x.index), x.index, _wide(x.data)) for x in update.addressable_shards
        ]
        places = {key: at for key, at, _ in shards}
        found = np.zeros_like(wanted)
        for _, at, values in shards:
            found[at] = values
        agree = all(np.array_equal(found[at], x, equal_nan=True) for _, at, x in shards)
        lengths = [size for size in self.on_mesh.mesh.axis_sizes if size > 1]
        return Difference(found, wanted, agree, [*places.values()], lengths)

    def cause(self, index: int, names: Sequence[str]) -> str:
        """The likely cause of a leaf's difference; empty if it has none."""
        if index not in self.differences:
            return ""
        step, difference, wanted = self.differences[index]
        others = dict(zip(names, wanted, strict=True))
        del others[names[index]]
        long = [name for name, size in self.on_mesh.mesh.shape.items() if size > 1]

        def hypotheses() -> Iterator[tuple[str, Array]]:
            for along in itertools.chain.from_iterable(
                itertools.combinations(long, count + 1) for count in range(len(long))
            ):
                yield (
                    f"each shard along {' and '.join(along)} is computed alone",
                    self._by_shards(along, step)[index],
                )

        return cause_of(difference, others, hypotheses)

    def _by_shards(self, along: Sequence[str], step: int) -> list[Array]:
        """The update of devices that have only their own shards along some axes."""
        if (along, step) not in self._instead:
            mesh, result = self.on_mesh.mesh, [np.zeros_like(x) for x in self.weights]
            cut = [
                PartitionSpec(
                    *(
                        tuple(x for x in typed_sharding.names(entry) if x in along)
                        for entry in spec
                    )
                )
                for spec in self.on_mesh.specs
            ]
            maps = [
                NamedSharding(mesh, spec).devices_indices_map(x.shape)
                for spec, x in zip(cut, self.weights, strict=True)
            ]
            places = {str(at): at for at in zip(*(x.values() for x in maps), strict=True)}
            chain = _Chain(
                self.on_one.optimizer, self.on_one.mesh, self.on_one.structure, cut
            )
            for at in places.values():
                weights, *grads = (
                    [x[place] for x, place in zip(arrays, at, strict=True)]
                    for arrays in (self.weights, *self.grads)
                )
                try:
                    updates = next(
                        itertools.islice(chain.updates(weights, grads), step, None)
                    )
                except Exception:  # Of an optimizer that refuses shards.
                    break
                for whole, place, update in zip(result, at, updates, strict=True):
                    whole[place] = update
            self._instead[along, step] = result
        return self._instead[along, step]


def _wide(x: Any) -> Array:
    """An array of the host, of float32 at least."""
    return np.asarray(x, jnp.promote_types(x.dtype, jnp.float32))


def _relative(off: Array, wanted: Array, axes: MatrixAxes) -> float:
    """The largest norm of a matrix's difference over that of the matrix."""
    with np.errstate(divide="ignore", invalid="ignore"):
        off, norms = (np.asarray(axes.norms(jnp.asarray(abs(x)))) for x in (off, wanted))
        ratio = np.nan_to_num(np.where(off == 0, 0, off / norms), nan=np.inf)
    return float(np.max(ratio, initial=0))
