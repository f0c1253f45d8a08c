"""ragged_dot_general: its three modes over any axes, against einsum over rows with NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import sweep
from jax import lax
from test_ragged_dot import normal

import jax_ggemm


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, in letters: an axis of each operand a letter; m is the ragged axis, g the group axis.

    `sizes` names the axes that group_sizes has before its groups.
    """

    lhs: str
    rhs: str
    sizes: str = ""

    def __str__(self) -> str:
        return "-".join((self.lhs, self.rhs, self.sizes or "_"))

    @property
    def shared(self) -> tuple[str, str]:
        """Batch axes, and contracting axes: both occur in both operands; batch axes are a, b, c."""
        common = [letter for letter in self.lhs if letter in self.rhs]
        return "".join(c for c in common if c in "abc"), "".join(c for c in common if c not in "abc")

    def numbers(self) -> lax.RaggedDotDimensionNumbers:
        batch, contract = self.shared

        def of(array: str, letters: str) -> tuple[int, ...]:
            return tuple(array.index(letter) for letter in letters)

        return lax.RaggedDotDimensionNumbers(
            ((of(self.lhs, contract), of(self.rhs, contract)), (of(self.lhs, batch), of(self.rhs, batch))),
            of(self.lhs, "m"),
            of(self.rhs, "g") if "g" in self.rhs else (),
        )

    def out(self) -> str:
        batch, contract = self.shared
        free = [c for c in self.lhs if c not in batch + contract]
        free += [c for c in self.rhs if c not in batch + contract + "g"]
        return ("" if "g" in self.rhs else "g") + batch + "".join(free)


EXTENTS = dict(zip("abcghijkmnpq", (2, 3, 2, 4, 2, 3, 2, 5, 9, 6, 3, 2), strict=True))
MODE_1 = [
    Case("mk", "gkn"),
    Case("km", "gkn"),
    Case("mk", "gnk"),
    Case("mk", "kgn"),
    Case("km", "nkg"),
    Case("mk", "ngk"),
    Case("amk", "gakn"),
    Case("amk", "agkn", "a"),
    Case("kma", "nkga", "a"),
    Case("bamk", "gakbn", "ba"),
    Case("abmk", "bagnk"),
    Case("hmk", "gkn", "h"),
    Case("hmk", "gkn"),
    Case("mhk", "gkn"),
    Case("himjk", "gkn", "hi"),
    Case("ahmik", "gakn", "ah"),
    Case("mkj", "gkjn"),
    Case("mkj", "gjkn"),
    Case("kmj", "gjnk"),
    Case("mk", "gknp"),
    Case("mk", "gnkp"),
    Case("mk", "gk"),
    Case("m", "gn"),
    Case("m", "g"),
    Case("bhmkja", "jgankpb"),
]
MODE_2 = [
    Case("mk", "mn"),
    Case("km", "nm"),
    Case("km", "mn"),
    Case("amk", "amn"),
    Case("amk", "amn", "a"),
    Case("kamb", "nmba", "ab"),
    Case("mhk", "mhn"),
    Case("hmk", "hmn"),
    Case("hmk", "hmn", "h"),
    Case("himjk", "mjihn", "hi"),
    Case("mkp", "mnq"),
    Case("m", "m"),
    Case("m", "mn"),
    Case("ahmk", "mnha", "ah"),
]


def sizes_of(case: Case) -> np.ndarray:
    rng = np.random.default_rng(len(str(case)))
    shape = (*(EXTENTS[letter] for letter in case.sizes), EXTENTS["g"])
    sizes = rng.integers(0, 5, shape).astype(np.int32)
    sizes[..., 1] = -(2**30)  # which times the length of an inner axis would overflow
    return sizes


def membership(case: Case, sizes: np.ndarray) -> np.ndarray:
    """1 where a row belongs to a group: axes (case.sizes..., g, m)."""
    result = np.zeros((*sizes.shape, EXTENTS["m"]))
    for index in np.ndindex(sizes.shape[:-1]):
        for g, (first, end) in enumerate(oracle.bounds(sizes[index], EXTENTS["m"])):
            result[(*index, g, slice(first, end))] = 1
    return result


def operands(case: Case) -> tuple[jax.Array, jax.Array, np.ndarray]:
    lhs, rhs = (
        normal(tuple(EXTENTS[letter] for letter in array), seed=i) for i, array in enumerate((case.lhs, case.rhs))
    )
    return lhs, rhs, sizes_of(case)


@pytest.mark.parametrize(("implementation", "case"), sweep(MODE_1 + MODE_2), ids=str)
def test_free_and_contracting_ragged_dimensions_of_any_layout(ragged_dot_general: Any, case: Case) -> None:
    lhs, rhs, sizes = operands(case)
    in_groups = membership(case, sizes)
    equation = f"{case.lhs},{case.rhs},{case.sizes}gm->{case.out()}"
    wide = (np.asarray(lhs, np.float64), np.asarray(rhs, np.float64), in_groups)
    want = np.einsum(equation, *wide, optimize=True)
    run = jax.jit(lambda x, w, s: ragged_dot_general(x, w, s, case.numbers()))
    got = run(lhs, rhs, sizes)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("implementation", "case"), sweep([MODE_1[9], MODE_1[-1], MODE_2[0], MODE_2[9]]), ids=str)
def test_gradients_of_the_general_form(ragged_dot_general: Any, case: Case) -> None:
    """lax has no gradient of its second mode; einsum's is the reference."""
    lhs, rhs, sizes = operands(case)
    in_groups = jnp.asarray(membership(case, sizes), jnp.float32)
    equation = f"{case.lhs},{case.rhs},{case.sizes}gm->{case.out()}"

    def op(lhs: Any, rhs: Any) -> jax.Array:
        return jnp.sum(jnp.sin(ragged_dot_general(lhs, rhs, sizes, case.numbers())))

    def reference(lhs: Any, rhs: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.einsum(equation, lhs, rhs, in_groups)))

    for got, want in zip(
        jax.jit(jax.grad(op, (0, 1)))(lhs, rhs), jax.jit(jax.grad(reference, (0, 1)))(lhs, rhs), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [MODE_1[0], MODE_1[6], MODE_1[13], MODE_2[0], MODE_2[3], MODE_2[6]], ids=str)
def test_shapes_and_values_equal_lax(case: Case) -> None:
    lhs, rhs, sizes = operands(case)
    sizes = np.maximum(sizes, 0)  # lax does not define negative sizes
    want = jax.jit(lambda *a: lax.ragged_dot_general(*a, case.numbers()))(lhs, rhs, sizes)
    got = jax.jit(lambda *a: jax_ggemm.ragged_dot_general(*a, case.numbers()))(lhs, rhs, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_batch_ragged_dimension_is_a_batched_product(ragged_dot_general: Any) -> None:
    lhs, rhs = normal((4, 3, 5)), normal((4, 5, 2))
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
    for sizes in (np.array([1, 3]), np.array([0, 0]), np.array([9])):
        got = ragged_dot_general(lhs, rhs, sizes, numbers)
        np.testing.assert_allclose(got, np.asarray(lhs) @ np.asarray(rhs), rtol=1e-5, atol=1e-6)


def test_group_offset_in_the_general_form(ragged_dot_general: Any) -> None:
    lhs, rhs, sizes = normal((5, 12)), normal((8, 2, 4)), np.array([3, 2, 4, 3])
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (1,), (1,))
    run = jax.jit(lambda x, w, o: ragged_dot_general(x, w, sizes, numbers, group_offset=o))
    lhs = normal((8, 12))
    for offset in (2, 0, -1):
        want = oracle.forward(np.asarray(lhs).T, np.moveaxis(np.asarray(rhs), 1, 0), sizes, offset)
        oracle.assert_close(run(lhs, rhs, jnp.array([offset])), want, sizes)


@pytest.mark.parametrize("zero", "akmng")
def test_zero_extents_in_the_general_form(ragged_dot_general: Any, zero: str) -> None:
    extents = {**EXTENTS, zero: 0}
    for case in (Case("amk", "gakn"), Case("amk", "amn")):
        lhs, rhs = (jnp.ones(tuple(extents[c] for c in array)) for array in (case.lhs, case.rhs))
        got = jax.jit(ragged_dot_general, static_argnums=3)(lhs, rhs, np.ones(extents["g"], np.int32), case.numbers())
        assert got.shape == tuple(extents[c] for c in case.out())
        if zero in "km" and zero not in case.out():
            np.testing.assert_array_equal(got, 0)


def test_tails_of_nan_in_the_second_mode(ragged_dot_general: Any) -> None:
    lhs, rhs, sizes = normal((12, 5)), normal((12, 3)), np.array([4, 0, 3])
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    run = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(ragged_dot_general(x, w, sizes, numbers) ** 2), (0, 1)))
    clean, poisoned = run(lhs, rhs), run(lhs.at[7:].set(jnp.nan), rhs.at[7:].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[1][0][7:], 0)


def test_weights_with_their_columns_outside_are_read_in_place() -> None:
    """(n, k) weights are no transposed copy: the program has no transpose."""
    lhs, rhs, sizes = jnp.ones((9, 5)), jnp.ones((4, 6, 5)), jnp.ones(4, jnp.int32)
    numbers = Case("mk", "gnk").numbers()
    run = jax.jit(lambda *a: jax_ggemm.ragged_dot_general(*a, numbers, implementation="cpu"))
    assert "transpose" not in run.lower(lhs, rhs, sizes).compile().as_text()
