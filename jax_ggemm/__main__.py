"""The command line: `python -m jax_ggemm info | compile | bench | tune`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

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
from jax_ggemm.command_arguments import (
    amount,
    count,
    float_dtype,
    number_dtype,
    output_file,
    output_folder,
    recorded_counts,
)
from jax_ggemm.device_state import State
from jax_ggemm.files import write_json
from jax_ggemm.kernel import architectures, config
from jax_ggemm.products import Product

_ONE_PROBLEM: dict[str, Any] = {"m": 1024, "k": 512, "n": 512, "groups": [8, 64], "repeats": 50}
"""What `bench` takes for one problem of equal groups where its options do not say otherwise."""

_UNREAD = {
    True: "it is of one problem of equal groups, timed on a CPU without --shapes, --counts and --layers",
    False: "it is of the table of shapes; say with --shapes, --counts or --layers what to time of it",
}
"""Why `bench` refuses an option, by whether it times the table."""


def _info(arguments: argparse.Namespace) -> None:
    """Says which implementation a call would take on this machine, and why not the others."""
    print(info.report(arguments.m, arguments.k, arguments.n, arguments.groups, arguments.dtype))


def _bench(arguments: argparse.Namespace) -> None:
    """Times grouped products. With --shapes, --counts or --layers, and on a GPU: the three products over a table of
    shapes, and whole layers, beside other implementations and what the machine reaches at most. Otherwise: one problem
    of equal groups, every implementation beside jax.lax.ragged_dot and a dense product, with the memory they take.
    """
    named = bool(arguments.shapes or arguments.counts or arguments.layers)
    table = named or jax.default_backend() == "gpu"
    for name in _ONE_PROBLEM if table else ("implementations",):
        if getattr(arguments, name) is not None:
            arguments.refuse(f"argument --{name}: {_UNREAD[table]}")
    if arguments.state is not None and jax.default_backend() == "cpu":
        arguments.refuse(
            "argument --state: it is what a GPU did before it is timed; this machine has none that JAX can use"
        )
    if table:
        bench_report.run(
            bench_report.Plan(
                shapes=bench_report.chosen_shapes(arguments.shapes or ([] if named else ["all"]), arguments.counts),
                layers=[bench_layer.BY_NAME[name] for name in arguments.layers],
                names=arguments.implementations or bench_products.NAMES,
                dtype=arguments.dtype or "bfloat16",
                budget=240.0 if arguments.budget is None else arguments.budget,
                state=State(arguments.state or State.STEADY),
                out=arguments.json,
            )
        )
        return
    dtype, budget = arguments.dtype or "float32", 20.0 if arguments.budget is None else arguments.budget
    asked = {name: getattr(arguments, name) or default for name, default in _ONE_PROBLEM.items()}
    problems = [benchmark.Shape(asked["m"], asked["k"], asked["n"], groups, dtype) for groups in asked["groups"]]
    reports = [
        benchmark.run(benchmark.Problem.random(shape, shape.equal_sizes()), asked["repeats"], budget)
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
        arguments.refuse("name what to tune for: --shapes, --counts or --problem")
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
    known = ["bfloat16", "float16", *(["float32"] if architecture.multiplies_float32 else [])]
    dtypes = arguments.dtypes or known
    if not set(dtypes) <= set(known):
        arguments.refuse(
            f"argument --dtypes: {' '.join(dtypes)}; there are kernels for {arguments.arch} of {', '.join(known)}"
        )
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
    counts: dict[str, Any] = {
        "nargs": "+",
        "type": recorded_counts,
        "default": [],
        "metavar": "FILE",
        "help": "histograms of --record-counts",
    }

    teller = commands.add_parser("info", help=_info.__doc__)
    teller.add_argument(
        "--dtype", type=number_dtype, default="bfloat16", help="of operands and results (default: %(default)s)"
    )
    teller.add_argument("--m", type=count, default=4096, help="rows (default: %(default)s)")
    teller.add_argument("--k", type=count, default=1024, help="rows of a weight matrix (default: %(default)s)")
    teller.add_argument("--n", type=count, default=1024, help="columns of a weight matrix (default: %(default)s)")
    teller.add_argument("--groups", type=count, default=64, help="number of groups (default: %(default)s)")
    teller.set_defaults(run=_info)

    bench = commands.add_parser("bench", help=_bench.__doc__)
    table = bench.add_argument_group("the table of shapes")
    table.add_argument(
        "--shapes", nargs="+", default=[], choices=["all", *shapes.BY_NAME], metavar="NAME", help="of the table, or all"
    )
    table.add_argument("--counts", **counts)
    table.add_argument(
        "--layers", nargs="+", default=[], choices=list(bench_layer.BY_NAME), metavar="NAME", help="whole layers"
    )
    table.add_argument(
        "--implementations",
        nargs="+",
        choices=bench_products.NAMES,
        metavar="NAME",
        help=f"which are timed; all unless named: {', '.join(bench_products.NAMES)}",
    )
    table.add_argument(
        "--state",
        choices=[state.value for state in State],
        help="of a GPU while it is timed: steady (the default; busy, as in training) or rested",
    )
    problem = bench.add_argument_group("one problem of equal groups")
    problem.add_argument("--m", type=count, help=f"rows (default: {_ONE_PROBLEM['m']})")
    problem.add_argument("--k", type=count, help=f"contracted columns (default: {_ONE_PROBLEM['k']})")
    problem.add_argument("--n", type=count, help=f"columns of the result (default: {_ONE_PROBLEM['n']})")
    problem.add_argument(
        "--groups",
        type=count,
        nargs="+",
        help=f"numbers of groups, of equal sizes (default: {_ONE_PROBLEM['groups']})",
    )
    problem.add_argument("--repeats", type=count, help=f"calls of each candidate (default: {_ONE_PROBLEM['repeats']})")
    bench.add_argument("--dtype", type=float_dtype, help="of operands; bfloat16 for the table, float32 for one problem")
    bench.add_argument(
        "--budget",
        type=amount,
        help="seconds: until only jax_ggemm is timed (the table, 240), of a candidate and pass (one problem, 20)",
    )
    bench.add_argument("--json", type=output_file, help="also write the figures to this file, after every shape")
    bench.set_defaults(run=_bench, refuse=bench.error)

    tuner = commands.add_parser("tune", help=_tune.__doc__)
    tuner.add_argument(
        "--shapes", nargs="+", default=[], choices=["all", *shapes.BY_NAME], metavar="NAME", help="of the table, or all"
    )
    tuner.add_argument("--counts", **counts)
    tuner.add_argument("--problem", nargs=4, type=count, metavar=("M", "K", "N", "GROUPS"), help="equal groups")
    tuner.add_argument(
        "--dtype", type=float_dtype, default="bfloat16", help="of operands and results (default: %(default)s)"
    )
    tuner.add_argument("--products", nargs="+", default=products, choices=products, help="which; all unless named")
    tuner.set_defaults(run=_tune, refuse=tuner.error)

    compiler = commands.add_parser("compile", help=_compile.__doc__)
    compiler.add_argument(
        "--arch", default="sm_90a", choices=list(architectures.BY_NAME), help="GPU architecture (default: %(default)s)"
    )
    compiler.add_argument("--out", type=output_folder, required=True, help="folder for the objects and manifest.json")
    compiler.add_argument(
        "--dtypes", nargs="+", help="dtypes of the operands, instead of all that there are kernels for"
    )
    compiler.add_argument("--products", nargs="+", default=products, choices=products, help="which; all unless named")
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
    compiler.add_argument("--max-mib", type=amount, help="fail if the objects have more together")
    compiler.set_defaults(run=_compile, refuse=compiler.error)

    arguments = parser.parse_args(argv)
    arguments.run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
