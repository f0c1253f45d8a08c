"""Times grouped products outside JAX on the shapes of `jax_ggemm.shapes`: torch's, quack's, and one dense product.

    python benchmarks/peers.py --shapes all --json peers.json

Needs torch, and quack-kernels where it is asked for. Times are of CUDA graphs of several calls, over their number, and
are taken as ours are, in the same state of the device (`jax_ggemm/device_state.py`).
"cublas" is a dense product of as many FLOPs. quack is autotuned on each shape and product; without --all-configurations
its tuner tries only those with clusters of two blocks along m and operands that are not swapped: half of its list or
fewer, in half of the time. `benchmarks/compare.py` puts the figures beside those of `python -m jax_ggemm bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import time
from typing import Any

from jax_ggemm.command_arguments import amount, output_file
from jax_ggemm.device_state import State
from jax_ggemm.files import write_json
from jax_ggemm.shapes import BY_NAME, TABLE

NAMES = ("torch", "quack", "cublas")


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["all"], choices=["all", *BY_NAME], metavar="NAME")
    parser.add_argument("--peers", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--state", default="steady", choices=[state.value for state in State], help="of the device")
    parser.add_argument("--all-configurations", action="store_true", help="for quack's tuner")
    parser.add_argument("--budget", type=amount, default=240.0, help="seconds after which no other shape is begun")
    parser.add_argument("--json", type=output_file, required=True, help="written after every shape")
    options = parser.parse_args()
    about = {}
    try:  # here, so that the options are read without them
        import torch  # noqa: PLC0415

        import torch_products  # noqa: PLC0415

        if "quack" in options.peers:
            import quack  # noqa: PLC0415

            about["quack"] = quack.__version__
    except ImportError as error:
        raise SystemExit(f"error: {error}; torch is needed, and quack-kernels for the peer quack") from error
    if not torch.cuda.is_available():
        raise SystemExit("error: torch finds no GPU on this machine")
    state, chosen = State(options.state), TABLE if "all" in options.shapes else [BY_NAME[n] for n in options.shapes]
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **about}
    if "quack" in options.peers and not options.all_configurations:
        torch_products.shorten_the_list_of_quack()
    start = time.perf_counter()
    report: dict[str, Any] = {
        "environment": {**about, "date": datetime.datetime.now(datetime.UTC).date().isoformat()},
        "dtype": str(torch_products.DTYPE).removeprefix("torch."),
        "state": state,
        "rates": torch_products.rates(state),
        "shapes": [],
        "products": [],
    }
    print(report["state"], report["rates"], flush=True)
    for shape in chosen:
        if time.perf_counter() - start > options.budget:
            print(f"out of time: {shape.name} and what follows are left out", flush=True)
            break
        report["products"] += torch_products.time_shape(shape, options.peers, state)
        report["shapes"].append(dataclasses.asdict(shape))
        torch.cuda.empty_cache()
        write_json(options.json, report)


if __name__ == "__main__":
    main()
