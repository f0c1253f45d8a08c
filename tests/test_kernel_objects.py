"""GPU kernels, as far as a machine without a GPU can tell: configurations, tile order, objects and their cache."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ggemm import __main__ as command_line
from jax_ggemm import compile_objects, objects
from jax_ggemm.kernel import config
from jax_ggemm.products import Product

pytestmark = pytest.mark.once

BF16 = np.dtype(jnp.bfloat16)
CANDIDATES = {candidate for product in Product for candidate in config.candidates(product)}
SPEC = config.KernelSpec(Product.FORWARD, BF16, BF16, False, config.Sm90Config())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's, and no object known in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(objects, "_registered", set())
    return objects.cache_directory()


@pytest.mark.parametrize("swizzle", [1, 2, 8])
@pytest.mark.parametrize("m_tiles", [1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("n_tiles", [1, 3, 16])
def test_every_tile_of_a_group_is_visited_once(swizzle: int, m_tiles: int, n_tiles: int) -> None:
    places = [config.place_in_group(i, m_tiles, n_tiles, swizzle, min) for i in range(m_tiles * n_tiles)]
    assert sorted(places) == [(m, n) for m in range(m_tiles) for n in range(n_tiles)]


def test_neighbouring_tiles_share_columns() -> None:
    places = [config.place_in_group(i, 32, 4, 8, min) for i in range(8)]
    assert places == [(m, 0) for m in range(8)]


def test_every_candidate_fits_the_hardware() -> None:
    for candidate in CANDIDATES:
        assert candidate.shared_memory_bytes <= config.SMEM_BYTES


@pytest.mark.parametrize(
    "wrong", [{"tile_m": 96}, {"tile_n": 8}, {"tile_m": 256}, {"stages": 1}, {"stages": 5}, {"cluster": 3}]
)
def test_impossible_configurations_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"tile|stages|clusters"):
        config.Sm90Config(**wrong)


@pytest.mark.parametrize("product", Product)
@pytest.mark.parametrize("m", [1, 512, 1 << 15])
@pytest.mark.parametrize("columns", [8, 128, 4096])
def test_the_pick_is_a_candidate(product: Product, m: int, columns: int) -> None:
    assert config.pick(product, m, columns, columns, 32) in config.candidates(product)


@pytest.mark.parametrize(
    ("rows", "tile_m"), [(1, 64), (32, 64), (64, 128), (146, 64), (256, 128), (512, 128), (8192, 128)]
)
def test_the_height_of_tiles_follows_the_rows_of_an_average_group(rows: int, tile_m: int) -> None:
    for product in (Product.FORWARD, Product.DLHS):
        assert config.pick(product, 32 * rows, 4096, 4096, 32).tile_m == tile_m
    assert config.pick(Product.DRHS, 32 * rows, 4096, 4096, 32).tile_m == 128


def test_blocks_share_contractions_where_a_matrix_has_few_tiles() -> None:
    assert config.pick(Product.DRHS, 32768, 768, 2048, 128).cluster == 2
    assert config.pick(Product.DRHS, 32768, 2048, 1536, 128).cluster == 1
    assert config.pick(Product.DRHS, 32768, 1024, 128, 128) == config.Sm90Config(128, 128, 6, cluster=2)
    with pytest.raises(ValueError, match="not shared by blocks with tiles of 64 rows"):
        dataclasses.replace(SPEC, product=Product.DRHS, config=config.Sm90Config(64, 256, 5, cluster=2))


def test_pairs_multiply_low_tiles_by_half_as_many_products() -> None:
    pair = config.pick(Product.FORWARD, 32 * 256, 4096, 4096, 32)
    assert pair.cluster == 2
    assert config.useful_rows(pair, [64, 65, 300, 0]) == 429 / (64 + 128 + 320)
    assert config.useful_rows(dataclasses.replace(pair, cluster=1), [64, 65, 300, 0]) == 429 / (128 + 128 + 384)


def test_useful_rows() -> None:
    assert config.useful_rows(config.Sm90Config(tile_m=128), [128, 1, 0]) == 129 / 256
    assert config.useful_rows(config.Sm90Config(tile_m=64), []) == 1.0


def test_the_key_depends_on_all_of_the_spec_and_not_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        dataclasses.replace(SPEC, product=Product.DLHS),
        dataclasses.replace(SPEC, in_dtype=np.dtype(np.float16)),
        dataclasses.replace(SPEC, out_dtype=np.dtype(np.float32)),
        dataclasses.replace(SPEC, has_bias=True),
        dataclasses.replace(SPEC, config=config.Sm90Config(stages=3)),
    ]
    keys = {objects.key(spec, "sm_90a") for spec in (SPEC, *others)}
    assert len(keys) == 1 + len(others)
    assert objects.key(SPEC, "sm_100a") not in keys
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert objects.key(SPEC, "sm_90a") in keys


def test_a_release_holds_each_kernel_once() -> None:
    specs = list(config.default_specs([BF16]))
    assert len(set(specs)) == len(specs)
    assert {spec.config for spec in specs} == CANDIDATES


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_object_is_built_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    built: list[str] = []

    def build(spec: config.KernelSpec, arch: str) -> bytes:
        built.append(arch)
        return b"object of " + arch.encode()

    monkeypatch.setattr(objects, "build", build)
    name = objects.ensure(SPEC, "sm_90a")
    path = cache / f"{name}.o"
    assert objects.read(path) == b"object of sm_90a"
    objects.ensure(SPEC, "sm_90a")
    assert built == ["sm_90a"]

    good = path.read_bytes()
    path.write_bytes({"cut": good[:-1], "flipped": bytes([good[0] ^ 1]) + good[1:], "empty": b""}[damage])
    assert objects.read(path) is None
    monkeypatch.setattr(objects, "_registered", set())
    objects.ensure(SPEC, "sm_90a")
    assert built == ["sm_90a", "sm_90a"]
    assert objects.read(path) == b"object of sm_90a"


def test_an_object_in_the_cache_needs_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(spec: config.KernelSpec, arch: str) -> bytes:
        raise AssertionError("compiled")

    monkeypatch.setattr(objects, "build", build)
    objects.write(cache / f"{objects.key(SPEC, 'sm_90a')}.o", b"ready")
    objects.ensure(SPEC, "sm_90a")


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(objects, "_registered", set())
    monkeypatch.setattr(objects, "build", lambda spec, arch: b"object")
    objects.ensure(SPEC, "sm_90a")


def _write_often(path: str, content: bytes, times: int) -> None:
    for _ in range(times):
        objects.write(Path(path), content)


def test_two_processes_fill_the_cache_at_once(tmp_path: Path) -> None:
    path = tmp_path / "key.o"
    contents = [bytes([i]) * 200_000 for i in range(2)]
    objects.write(path, contents[0])
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(str(path), content, 50)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert objects.read(path) in contents
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert os.listdir(tmp_path) == ["key.o"]


def test_the_compile_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    specs = [dataclasses.replace(SPEC, product=product) for product in Product]
    monkeypatch.setattr(config, "default_specs", lambda dtypes, candidates: specs)
    command_line.main(["compile", "--arch", "sm_90a", "--out", str(tmp_path), "--keep", "ptx,cubin"])
    entries = json.loads((tmp_path / "manifest.json").read_text())["kernels"]
    assert [entry["product"] for entry in entries] == ["forward", "dlhs", "drhs"]
    for spec, entry in zip(specs, entries, strict=True):
        assert entry["key"] == objects.key(spec, "sm_90a")
        assert entry["arch"] == "sm_90a"
        assert entry["config"] == dataclasses.asdict(spec.config)
        assert entry["dtypes"] == {"operands": "bfloat16", "result": "bfloat16"}
        assert entry["shared_memory_bytes"] <= config.SMEM_BYTES
        data = objects.read(tmp_path / f"{entry['key']}.o")
        assert data is not None
        assert (tmp_path / f"{entry['key']}.cubin").read_bytes() == compile_objects.cubin(data)
        ptx = (tmp_path / f"{entry['key']}.ptx").read_text()
        assert ".target sm_90a" in ptx
        assert "wgmma.mma_async" in ptx
        if not compile_objects.missing_tools():
            assert 0 < entry["registers"] <= 168
            assert (entry["stack_bytes"], entry["local_bytes"], entry["spill_instructions"]) == (0, 0, 0)


@pytest.fixture
def pretended_compiler(monkeypatch: pytest.MonkeyPatch) -> list[config.KernelSpec]:
    """Compilations that take no time; the list gets every spec that was compiled."""
    compiled: list[config.KernelSpec] = []

    def build_all(specs: list[config.KernelSpec], arch: str) -> Iterator[objects.Compiled]:
        for spec in specs:
            compiled.append(spec)
            yield objects.Compiled(b"object " + spec.product.value.encode(), f"// {spec.product.value}")

    monkeypatch.setattr(objects, "build_all", build_all)
    monkeypatch.setattr(compile_objects, "resources", lambda data: {})
    return compiled


def test_only_what_is_missing_is_compiled(tmp_path: Path, pretended_compiler: list[config.KernelSpec]) -> None:
    specs = [dataclasses.replace(SPEC, product=product) for product in Product]
    paths = [tmp_path / f"{objects.key(spec, 'sm_90a')}.o" for spec in specs]
    compile_objects.compile_all(specs[:2], "sm_90a", tmp_path)
    paths[0].write_bytes(b"damaged")
    compile_objects.compile_all(specs, "sm_90a", tmp_path)
    assert pretended_compiler == [*specs[:2], specs[0], specs[2]]
    assert [objects.read(path) for path in paths] == [b"object forward", b"object dlhs", b"object drhs"]
    assert not list(tmp_path.glob("*.ptx"))
    compile_objects.compile_all(specs[:1], "sm_90a", tmp_path, keep=["ptx"])  # from the object's own compilation
    assert pretended_compiler[4:] == specs[:1]
    assert paths[0].with_suffix(".ptx").read_text() == "// forward"


@pytest.mark.usefixtures("pretended_compiler")
def test_a_release_of_too_many_bytes_is_refused(tmp_path: Path) -> None:
    specs = [dataclasses.replace(SPEC, product=product) for product in Product]
    total = sum(len(f"object {product.value}") for product in Product)
    with pytest.raises(ValueError, match=f"3 kernels have {total} bytes, more than the {total - 1} that are allowed"):
        compile_objects.compile_all(specs, "sm_90a", tmp_path, max_bytes=total - 1)
    assert not (tmp_path / "manifest.json").exists()
    compile_objects.compile_all(specs, "sm_90a", tmp_path, max_bytes=total)
    assert (tmp_path / "manifest.json").exists()


@pytest.mark.usefixtures("pretended_compiler")
def test_what_a_release_holds(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .* kernels have"):
        command_line.main(["compile", "--out", str(tmp_path), "--release", "--max-mib", "0.0001"])
    command_line.main(["compile", "--out", str(tmp_path), "--release"])
    entries = json.loads((tmp_path / "manifest.json").read_text())["kernels"]
    assert {entry["dtypes"]["operands"] for entry in entries} == {"bfloat16", "float16"}
    assert all(entry["dtypes"]["operands"] == entry["dtypes"]["result"] and not entry["bias"] for entry in entries)
    for product in Product:
        configs = {json.dumps(entry["config"]) for entry in entries if entry["product"] == product.value}
        assert len(configs) == len(config.candidates(product))


def test_without_the_compiler_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'jax_ggemm\[compile\]'"):
        command_line.main(["compile", "--out", str(tmp_path)])
