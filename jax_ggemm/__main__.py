"""The command line: `python -m jax_ggemm info | compile | bench | tune`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import jax_ggemm
from jax_ggemm import (
    bench_layer,
    bench_products,
    bench_report,
    benchmark,
    compile_objects,
    info,
    shapes,
    tune,
    tuned,
)
from jax_ggemm.device_state import State
from jax_ggemm.files import write_json
from jax_ggemm.kernel import architectures, config
from jax_ggemm.products import Product


def _info(arguments: argparse.Namespace) -> None:
    """Says which implementation a call would take on this machine, and why not the others."""
    print(info.report(arguments.m, arguments.k, arguments.n, arguments.groups, arguments.dtype))


def _bench(arguments: argparse.Namespace) -> None:
    """Times grouped products. With --shapes, --counts or --layers, and on a GPU: the three products over a table of
    shapes, and whole layers, beside other implementations and what the machine reaches at most. Otherwise: one problem
    of equal groups, every implementation beside jax.lax.ragged_dot and a dense product, with the memory they take.
    """
    if arguments.state is not None and jax.default_backend() == "cpu":
        raise SystemExit("error: --state is what a GPU did before it is timed; this machine has none that JAX can use")
    named = arguments.shapes or arguments.counts or arguments.layers
    if named or jax.default_backend() == "gpu":
        bench_report.run(
            bench_report.Plan(
                shapes=bench_report.chosen_shapes(
                    arguments.shapes or ([] if named else ["all"]), arguments.counts or []
                ),
                layers=[bench_layer.BY_NAME[name] for name in arguments.layers],
                names=arguments.implementations,
                dtype=arguments.dtype or "bfloat16",
                budget=240.0 if arguments.budget is None else arguments.budget,
                state=arguments.state or State.STEADY,
                out=arguments.json,
            )
        )
        return
    dtype, budget = arguments.dtype or "float32", 20.0 if arguments.budget is None else arguments.budget
    problems = [benchmark.Shape(arguments.m, arguments.k, arguments.n, groups, dtype) for groups in arguments.groups]
    reports = [
        benchmark.run(benchmark.Problem.random(shape, shape.equal_sizes()), arguments.repeats, budget)
        for shape in problems
    ]
    report = benchmark.as_json(problems, reports)
    print(", ".join(f"{key} {value}" for key, value in report["environment"].items()))
    print(benchmark.table(problems, reports))
    if arguments.json is not None:
        write_json(arguments.json, report)


def _tune(arguments: argparse.Namespace) -> None:
    """Measures the configurations of the GPU kernels on shapes, and keeps the best of each in the user's cache, where
    calls find it: those with the same dtypes, groups, k and n, and as many rows up to the next power of two. A program
    that is compiled already keeps what it has.
    """
    chosen = bench_report.chosen_shapes(arguments.shapes, arguments.counts)
    if arguments.problem is not None:
        m, k, n, groups = arguments.problem
        equal = benchmark.Shape(m, k, n, groups).equal_sizes().tolist()
        chosen.append(shapes.GroupedShape(f"{m}x{k}x{n}", k, n, tuple(equal), "named on the command line"))
    if not chosen:
        raise SystemExit("error: name what to tune for: --shapes, --counts or --problem")
    products = [Product(name) for name in arguments.products]
    found = []
    with tqdm.tqdm(total=len(chosen) * len(products), unit="product", disable=None) as bar:
        try:
            for result in tune.run(chosen, products, arguments.dtype):
                found.append(result)
                bar.update()
                bar.set_postfix_str(f"{result.shape} {result.problem.product.value}")
        except NotImplementedError as error:
            raise SystemExit(f"error: {error}") from error
        finally:
            if found:
                print(tune.table(found))
    for result in found:
        for candidate, reason in result.left_out.items():
            print(f"left out for {result.shape} {result.problem.product.value}: {candidate}: {reason}")
    print(f"stored in {tuned.directory()}")


def _compile(arguments: argparse.Namespace) -> None:
    """Compiles GPU kernels ahead of time, on any machine that has the CuTe DSL."""
    architecture = architectures.BY_NAME[arguments.arch]
    dtypes = arguments.dtypes or ["bfloat16", "float16", *(["float32"] if architecture.multiplies_float32 else [])]
    specs = [
        spec
        for spec in config.default_specs([np.dtype(jnp.dtype(name)) for name in dtypes], architecture.candidates)
        if spec.product.value in arguments.products and _is_in_release(spec, arguments.release)
    ]
    limit = None if arguments.max_mib is None else int(arguments.max_mib * 2**20)
    try:
        entries = compile_objects.compile_all(specs, arguments.arch, arguments.out, arguments.keep, limit)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
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
    products = [product.value for product in Product]

    teller = commands.add_parser("info", help=_info.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    teller.add_argument("--dtype", default="bfloat16", help="dtype of operands and results")
    teller.add_argument("--m", type=int, default=4096, help="rows")
    teller.add_argument("--k", type=int, default=1024, help="columns of the weights' first axis")
    teller.add_argument("--n", type=int, default=1024, help="columns of the weights' second axis")
    teller.add_argument("--groups", type=int, default=64, help="number of groups")
    teller.set_defaults(run=_info)

    bench = commands.add_parser("bench", help=_bench.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    table = bench.add_argument_group("the table of shapes")
    table.add_argument(
        "--shapes", nargs="+", default=[], choices=["all", *shapes.BY_NAME], metavar="NAME", help="of the table, or all"
    )
    table.add_argument("--counts", nargs="+", type=Path, metavar="FILE", help="histograms of --record-counts")
    table.add_argument(
        "--layers", nargs="+", default=[], choices=list(bench_layer.BY_NAME), metavar="NAME", help="whole layers"
    )
    table.add_argument(
        "--implementations",
        nargs="+",
        default=list(bench_products.NAMES),
        choices=bench_products.NAMES,
        metavar="NAME",
        help="which are timed",
    )
    table.add_argument(
        "--state",
        type=State,
        choices=list(State),
        help="of a GPU while it is timed: steady (the default; busy, as in training) or rested",
    )
    problem = bench.add_argument_group("one problem of equal groups")
    problem.add_argument("--m", type=int, default=1024, help="rows")
    problem.add_argument("--k", type=int, default=512, help="contracted columns")
    problem.add_argument("--n", type=int, default=512, help="columns of the result")
    problem.add_argument("--groups", type=int, nargs="+", default=[8, 64], help="numbers of groups, of equal sizes")
    problem.add_argument("--repeats", type=int, default=50, help="calls of each candidate")
    bench.add_argument("--dtype", help="of the operands; bfloat16 for the table, float32 for one problem")
    bench.add_argument(
        "--budget",
        type=float,
        help="seconds: until only jax_ggemm is timed (the table, 240), of a candidate and pass (one problem, 20)",
    )
    bench.add_argument("--json", type=Path, help="also write the figures to this file, after every shape")
    bench.set_defaults(run=_bench)

    tuner = commands.add_parser("tune", help=_tune.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    tuner.add_argument(
        "--shapes", nargs="+", default=[], choices=["all", *shapes.BY_NAME], metavar="NAME", help="of the table, or all"
    )
    tuner.add_argument(
        "--counts", nargs="+", default=[], type=Path, metavar="FILE", help="histograms of --record-counts"
    )
    tuner.add_argument("--problem", nargs=4, type=int, metavar=("M", "K", "N", "GROUPS"), help="equal groups")
    tuner.add_argument("--dtype", default="bfloat16", help="of operands and results")
    tuner.add_argument("--products", nargs="+", default=products, choices=products, help="which products")
    tuner.set_defaults(run=_tune)

    compiler = commands.add_parser(
        "compile", help=_compile.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    compiler.add_argument("--arch", default="sm_90a", choices=list(architectures.BY_NAME), help="GPU architecture")
    compiler.add_argument("--out", type=Path, required=True, help="folder for the objects and manifest.json")
    compiler.add_argument(
        "--dtypes", nargs="+", help="dtypes of the operands, instead of all that there are kernels for"
    )
    compiler.add_argument("--products", nargs="+", default=products, choices=products, help="which products")
    compiler.add_argument(
        "--keep",
        type=_kept,
        default=[],
        metavar="ptx,cubin",
        help="also write each kernel's PTX, machine code, or both",
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
