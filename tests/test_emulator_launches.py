"""The PTX emulator refuses launches that no GPU would take, and arrays that do not fit, before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import ptx_emulator
import pytest
from emulated_programs import HEAD
from ptx_emulator import Checks, Costs, Launch, Memory, emulate, native

from jax_ggemm.kernel import config
from jax_ggemm.products import Product

pytestmark = pytest.mark.emulator

_TEXT = HEAD.format(target="sm_90a", body="")


@pytest.mark.parametrize(
    ("message", "launch"),
    [
        ("block .* has 2048 threads: 1024", {"block": (1024, 2, 1)}),
        ("block .*1 to", {"block": (2048, 1, 1)}),
        ("block .*1 to", {"block": (1, 1, 65)}),
        ("block .*1 to", {"block": (0, 1, 1)}),
        ("block .*1 to", {"block": (32, 1)}),
        ("grid .*1 to", {"grid": (0, 1, 1)}),
        ("grid .*1 to", {"grid": (1, 65536, 1)}),
        ("cluster .*1 to", {"grid": (32, 1, 1), "cluster": (32, 1, 1)}),
        ("cluster .* has 32 CTAs: 16", {"grid": (8, 4, 1), "cluster": (8, 4, 1)}),
        ("not made of clusters", {"grid": (3, 1, 1), "cluster": (2, 1, 1)}),
        ("shared memory: 232448 are possible", {"shared_bytes": 512 * 1024}),
        ("shared memory: 232448 are possible", {"shared_bytes": 227 * 1024 + 16}),
        ("shared memory", {"shared_bytes": -1}),
        ("takes 2 parameters, 1 were given", {"params": [0]}),
    ],
)
def test_launches_that_no_gpu_takes(message: str, launch: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        emulate(_TEXT, Launch(**({"params": [0, 0]} | launch)), Memory())


@pytest.mark.parametrize(
    ("message", "launch"),
    [
        (r"grid \(1\.0, 1, 1\): its extents must be integers", {"grid": (1.0, 1, 1)}),
        ("block .* its extents must be integers", {"block": (32, None, 1)}),
        ("shared_bytes 16.0: it must be an integer", {"shared_bytes": 16.0}),
        ("parameter x is a number of 8 bytes, NoneType was given", {"params": [None, 0]}),
        (r"parameter y is a number of 8 bytes, ndarray was given: .*array\.ctypes\.data", {"params": [0, np.zeros(4)]}),
        ("parameter x .* str was given", {"params": ["5", 0]}),
    ],
)
def test_values_of_another_type(message: str, launch: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=message):
        emulate(_TEXT, Launch(**({"params": [0, 0]} | launch)), Memory())


def test_extents_of_numpy() -> None:
    one, warp = np.int64(1), np.int32(32)
    assert emulate(_TEXT, Launch((one, one, one), (warp, one, one), params=[np.uint64(0), 0]), Memory()).instructions


@pytest.mark.parametrize(
    ("directive", "launch", "right"),
    [
        (".maxntid 64", {"block": (65, 1, 1)}, False),
        (".maxntid 64", {"block": (64, 1, 1)}, True),
        (".maxntid 8, 8", {"block": (64, 1, 1)}, True),
        (".reqntid 64", {"block": (32, 1, 1)}, False),
        (".reqntid 8, 4", {"block": (8, 4, 1)}, True),
        (".reqnctapercluster 2", {}, False),
        (".reqnctapercluster 2", {"grid": (2, 1, 1), "cluster": (2, 1, 1)}, True),
    ],
)
def test_what_a_kernel_requires(directive: str, launch: dict[str, Any], right: bool) -> None:
    text = _TEXT.replace("\n{", f"\n{directive}\n{{", 1).replace(".param .u64 y)", f".param .u64 y) {directive}")
    text = text.replace(f"\n{directive}\n{{", "\n{")
    if right:
        emulate(text, Launch(params=[0, 0], **launch), Memory())
        return
    with pytest.raises(ValueError, match=r"blocks of|clusters of"):
        emulate(text, Launch(params=[0, 0], **launch), Memory())


def _of_param(declared: str, load: str, value: Any) -> np.ndarray:
    y = np.zeros(8, np.uint8)
    memory = Memory()
    memory.add("y", y, writable=True)
    text = HEAD.format(target="sm_90a", body=f"{load} ").replace(
        "(.param .u64 x,", f"(.param .{declared} p, .param .u64 x,"
    )
    emulate(text, Launch(block=(1, 1, 1), params=[value, 0, y.ctypes.data]), memory)
    return y


@pytest.mark.parametrize("value", [1.5, np.float32(1.5), np.float64(1.5)])
def test_parameters_of_floating_point(value: float) -> None:
    load32, load64 = (f"ld.param.f{n} %{r}1, [p]; st.global.f{n} [%rd2], %{r}1;" for n, r in ((32, "f"), (64, "d")))
    assert _of_param("f32", load32, value)[:4].view(np.float32)[0] == 1.5
    assert _of_param("b32", load32, value)[:4].view(np.float32)[0] == 1.5
    assert _of_param("f64", load64, value).view(np.float64)[0] == 1.5
    assert _of_param("f32", load32, 2)[:4].view(np.float32)[0] == 2
    with pytest.raises(TypeError, match=r"p is an integer of 4 bytes, .*1\.5"):
        _of_param("u32", load32, value)


@pytest.mark.parametrize("value", [1 << 32, -(1 << 31) - 1, bytes(5)])
def test_parameters_that_do_not_fit(value: Any) -> None:
    with pytest.raises(ValueError, match="parameter p has 4 bytes"):
        _of_param("u32", "ld.param.u32 %r5, [p];", value)


def test_an_array_that_is_read_only() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    Memory().add("x", array)
    with pytest.raises(ValueError, match="'x' is writable for the kernel, and its array is read-only"):
        Memory().add("x", array, writable=True)


def test_an_architecture_without_kernels() -> None:
    with pytest.raises(ValueError, match=r"arch 'sm_91': there are kernels for sm_90a, sm_100a"):
        ptx_emulator.implementation("sm_91")


def test_a_timeline_that_nobody_would_see() -> None:
    checks = Checks(timeline=Costs())
    with pytest.raises(ValueError, match="timeline: only `on_report`"):
        ptx_emulator.implementation("sm_90a", checks=checks)
    ptx_emulator.implementation("sm_90a", checks=checks, on_report=print)


_BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("group_sizes must be int32 of rank 2, int64", {"group_sizes": np.array([[100, 30]])}),
        ("lhs must be bfloat16 of rank 3, float32", {"lhs": np.ones((1, 130, 64), np.float32)}),
        ("lhs must be bfloat16 of rank 3", {"lhs": np.ones((130, 64), _BF16)}),
        ("is not made of", {"rhs": np.ones((1, 2, 32, 64), _BF16)}),
        ("is not made of", {"lhs": np.ones((1, 140, 64), _BF16)}),
        ("is not made of", {"lhs": np.ones((2, 130, 64), _BF16)}),
        ("is not made of", {"group_offset": np.zeros(3, np.int32)}),
        ("the kernel takes", {"group_offset": None}),
        ("the kernel takes", {"bias": np.ones((1, 2, 64), np.float32)}),
    ],
)
def test_arrays_that_do_not_fit(message: str, changes: dict[str, np.ndarray | None]) -> None:
    spec = config.KernelSpec(Product.FORWARD, _BF16, _BF16, False, config.candidates(Product.FORWARD)[0])
    arrays: dict[str, np.ndarray | None] = {
        "lhs": np.ones((1, 130, 64), _BF16),
        "rhs": np.ones((1, 2, 64, 64), _BF16),
        "group_sizes": np.array([[100, 30]], np.int32),
        "group_offset": np.zeros(1, np.int32),
        **changes,
    }
    from ptx_emulator import kernels  # noqa: PLC0415  (needs the package under test)

    with pytest.raises(ValueError, match=message):
        kernels.run(spec, "sm_90a", {k: v for k, v in arrays.items() if v is not None}, (1, 130, 64))


def test_the_cache_keeps_the_versions_that_were_used_last(tmp_path: Path) -> None:
    for stem in ("core", "other"):
        for i in range(12):
            path = tmp_path / f"{stem}-{i:02}.so"
            path.touch()
            os.utime(path, (i, i))
    native.forget_old(tmp_path, ["core"], ".so")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in left if name.startswith("core")] == [f"core-{i:02}.so" for i in range(4, 12)]
    assert len([name for name in left if name.startswith("other")]) == 12
