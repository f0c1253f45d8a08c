"""The command line: `python -m jax_ggemm info | compile | bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_ggemm
from jax_ggemm import benchmark, binding, compile_objects
from jax_ggemm.files import write_json
from jax_ggemm.kernel import config
from jax_ggemm.products import Product


def _info(arguments: argparse.Namespace) -> None:
    """Says which implementation a call would take on this machine, and why not the others."""
    device = jax.devices()[0]
    print(f"jax_ggemm {jax_ggemm.__version__}, jax {jax.__version__}, {device.platform}: {device.device_kind}")
    chosen = False
    for name in binding.NAMES:
        try:
            product = jnp.zeros((8, 8), arguments.dtype)
            jax.jit(jax_ggemm.ragged_dot, static_argnames="implementation").lower(
                product, product[None], jnp.ones(1, jnp.int32), implementation=name
            ).compile()
            reason = "available" if chosen else "available: calls take it"
            chosen = True
        except (NotImplementedError, ImportError) as error:
            reason = str(error)
        print(f"  {name:5s} {arguments.dtype}: {reason}")


def _bench(arguments: argparse.Namespace) -> None:
    """Times the implementations beside `jax.lax.ragged_dot` and a dense product of the same useful work."""
    shapes = [
        benchmark.Shape(arguments.m, arguments.k, arguments.n, groups, arguments.dtype) for groups in arguments.groups
    ]
    reports = [
        benchmark.run(benchmark.Problem.random(shape, shape.equal_sizes()), arguments.repeats, arguments.budget)
        for shape in shapes
    ]
    report = benchmark.as_json(shapes, reports)
    print(", ".join(f"{key} {value}" for key, value in report["environment"].items()))
    print(benchmark.table(shapes, reports))
    if arguments.json is not None:
        write_json(arguments.json, report)


def _compile(arguments: argparse.Namespace) -> None:
    """Compiles GPU kernels ahead of time, on any machine that has the CuTe DSL."""
    specs = [
        spec
        for spec in config.default_specs([np.dtype(jnp.dtype(name)) for name in arguments.dtypes])
        if spec.product.value in arguments.products and _is_in_release(spec, arguments.release)
    ]
    limit = None if arguments.max_mib is None else int(arguments.max_mib * 2**20)
    entries = compile_objects.compile_all(specs, arguments.arch, arguments.out, arguments.keep, limit)
    total = sum(entry["object_bytes"] for entry in entries)
    print(f"{len(entries)} kernels for {arguments.arch} in {arguments.out}, {total / 2**20:.1f} MiB")
    missing = compile_objects.missing_tools()
    if missing:
        print(f"registers and spills are null in the manifest: pip install {' '.join(missing)}")


def _is_in_release(spec: config.KernelSpec, release: bool) -> bool:
    """True for every kernel, or for the ones that a training step with weights of its own dtype takes."""
    return not release or (spec.out_dtype == spec.in_dtype and not spec.has_bias)


def _kept(text: str) -> list[str]:
    """The value of --keep: names with commas between them."""
    names = text.split(",")
    unknown = [name for name in names if name not in compile_objects.KEEP]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(compile_objects.KEEP)}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Runs a command; see `python -m jax_ggemm --help`."""
    parser = argparse.ArgumentParser(prog="python -m jax_ggemm", description=jax_ggemm.__doc__)
    commands = parser.add_subparsers(required=True)

    info = commands.add_parser("info", help=_info.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    info.add_argument("--dtype", default="float32", help="dtype of the operands")
    info.set_defaults(run=_info)

    bench = commands.add_parser("bench", help=_bench.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    bench.add_argument("--m", type=int, default=1024, help="rows")
    bench.add_argument("--k", type=int, default=512, help="contracted columns")
    bench.add_argument("--n", type=int, default=512, help="columns of the result")
    bench.add_argument("--groups", type=int, nargs="+", default=[8, 64], help="numbers of groups, of equal sizes")
    bench.add_argument("--dtype", default="float32", help="dtype of the operands")
    bench.add_argument("--repeats", type=int, default=50, help="calls of each candidate")
    bench.add_argument("--budget", type=float, default=20.0, help="seconds for one candidate and pass")
    bench.add_argument("--json", type=Path, help="also write the figures to this file")
    bench.set_defaults(run=_bench)

    compiler = commands.add_parser(
        "compile", help=_compile.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    compiler.add_argument("--arch", default="sm_90a", choices=["sm_90a"], help="GPU architecture")
    compiler.add_argument("--out", type=Path, required=True, help="folder for the objects and manifest.json")
    compiler.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], help="dtypes of the operands")
    products = [product.value for product in Product]
    compiler.add_argument("--products", nargs="+", default=products, choices=products, help="which products")
    compiler.add_argument(
        "--keep", type=_kept, default=[], metavar="ptx,cubin", help="also write each kernel's PTX, machine code, or both"
    )
    compiler.add_argument(
        "--release", action="store_true", help="only what a wheel holds: results of the operands' dtype, no bias"
    )
    compiler.add_argument("--max-mib", type=float, help="fail if the objects have more together")
    compiler.set_defaults(run=_compile)

    arguments = parser.parse_args(argv)
    arguments.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
