"""What `python -m jax_ggemm info` says, on this machine and on one that is pretended."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_ggemm import __main__ as command_line
from jax_ggemm import binding, cute, info, native, objects, tuned
from jax_ggemm.kernel import config
from jax_ggemm.products import Product

F32 = np.dtype(np.float32)


def test_each_product_names_what_it_takes_and_why_not_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.main(["info", "--dtype", "float32"])
    text = capsys.readouterr().out
    for product in Product:
        assert f"  {product.value}: takes 'cpu'" in text
    assert text.count("not 'cute': ") == 3
    assert "compiled library: loaded" in text
    assert str(objects.cache_directory()) in text
    assert str(tuned.directory()) in text


def test_a_dtype_that_only_plain_jax_takes(capsys: pytest.CaptureFixture[str]) -> None:
    command_line.main(["info", "--dtype", "int32"])
    text = capsys.readouterr().out
    assert "forward: takes 'xla'" in text
    assert "not 'cpu': lhs has dtype int32" in text


def test_the_default_precision_is_that_of_the_call() -> None:
    with jax.default_matmul_precision("F32_F32_F32"):
        assert "not 'cpu': precision" in info.report(64, 64, 64, 2, "float32")
    assert "takes 'cpu'" in info.report(64, 64, 64, 2, "float32")


def test_the_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("the compiled library libjax_ggemm.so is missing: install it")

    monkeypatch.setattr(native, "register", absent)
    text = info.report(64, 64, 64, 2, "float32")
    assert "compiled library: missing: the compiled library libjax_ggemm.so is missing: install it" in text
    assert "forward: fails: 'cpu' needs the compiled library" in text
    assert "takes 'xla'" in info.report(64, 64, 64, 2, "int32")


def test_the_missing_runtime_and_compiler_of_the_dsl_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "runtime_library", lambda: None)
    text = info.report(64, 64, 64, 2, "float32")
    assert "CuTe DSL runtime: none; the GPU kernels need it" in text


def test_on_a_gpu_the_kernel_and_its_configuration_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cute, "unsupported", lambda call, operands: None)
    choice = info.choose(Product.FORWARD, 64, 64, 64, 2, F32)
    assert choice.taken == "cute"
    assert list(choice.refusals) == list(binding.NAMES)
    assert choice.refusals["cpu"] == "it runs on a cpu, and the default backend here is gpu"
    text = info.report(64, 64, 64, 2, "float32")
    assert f"picked: {config.pick(Product.FORWARD, 64, 64, 64, 2)}" in text
    other = next(c for c in config.candidates(Product.DRHS) if c != config.pick(Product.DRHS, 64, 64, 64, 2))
    monkeypatch.setattr(tuned, "pick", lambda problem, arch: other)
    assert f"tuned: {other}" in info.report(64, 64, 64, 2, "float32")
