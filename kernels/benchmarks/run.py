"""Time and error of the CPU matmuls, per layout and number of rows.

    python kernels/benchmarks/run.py [--threads 2] [--shapes 1536x576,...] [--rows 1,4,16,128] [--json FILE]

GB/s counts the stored bytes of the weight once, beside the read bandwidth measured in the same run; at one
row the copies of a weight exceed `--cold-mb`, so that they come from memory. Each figure is the median of
`--repeats` rounds in which the variants take turns. `error` is the root mean square of y against the same
codes times fp32 activations, relative to that of y, for normal x.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

from hfaccel_kernels import dispatch, native, packing
from hfaccel_kernels.layouts import Layout
from hfaccel_kernels.qlinear import plain_linear, qlinear

LAYOUTS = {
    "int8": Layout(8),
    "int8 a16": Layout(8, act_bits=16),
    "int4 g64": Layout(4, 64, False, "fp16"),
    "int4 g64 a16": Layout(4, 64, False, "fp16", 16),
    "int4 g64 sym": Layout(4, 64, True, "fp16"),
    "int3 g64": Layout(3, 64, False, "fp16"),
    "int2 g64": Layout(2, 64, False, "fp16"),
    "nf4 g64": Layout(4, 64, True, "double", code="nf4"),
    "fp8 e4m3": Layout(8, code="e4m3", act="token"),
    "w8a8": Layout(8, act="token"),
}
SHAPES = {  # N x K
    "SmolLM2-135M q/o": (576, 576),
    "SmolLM2-135M gate+up": (3072, 576),
    "SmolLM2-135M down": (576, 1536),
    "1.17B q/o": (2048, 2048),
    "1.17B gate+up": (11264, 2048),
    "1.17B down": (2048, 5632),
}


def random_packed(layout: Layout, n: int, k: int) -> tuple:
    shapes = layout.shapes(n, k)
    scale = torch.rand(n, layout.groups(k)) * 0.1
    zero = None
    if not layout.symmetric:
        zero = torch.randint(0, 1 << layout.bits, shapes["weight_zero"][0], dtype=torch.uint8)
    weight = torch.randint(0, 256, shapes["weight"][0], dtype=torch.uint8)
    if layout.is_float:
        weight &= 0xBF  # finite
    return weight, packing.pack_scales(scale, layout), zero


def variants(n: int, k: int, m: int, cold_bytes: int):
    """(name, bytes of the weight, one function a copy) of all that computes x [m, k] times W [n, k]."""
    x = torch.randn(m, k)

    def copies(size: int) -> range:
        return range(max(1, min(200, cold_bytes // size if m <= 16 else 1)))

    for name, layout in LAYOUTS.items():
        size = layout.bytes(n, k)
        packed = [random_packed(layout, n, k) for _ in copies(size)]
        yield name, size, [lambda p=p, o=layout: qlinear(x, *p, None, o, n, k) for p in packed]
    weights = [torch.randn(n, k).bfloat16() for _ in copies(n * k * 2)]
    yield "bf16 in place", n * k * 2, [lambda w=w: plain_linear(x, w) for w in weights]
    half = x.bfloat16()
    yield "torch bf16", n * k * 2, [lambda w=w: F.linear(half, w) for w in weights]


def seconds(functions: list) -> float:
    start = time.perf_counter()
    for function in functions:
        function()
    return (time.perf_counter() - start) / len(functions)


def bandwidth(repeats: int) -> float:
    """Bytes a second that all threads together read, as torch's sum over 256 MiB has it."""
    big = torch.ones(64 << 20)
    return max(big.nbytes / seconds([big.sum]) for _ in range(repeats + 2))


def error(layout: Layout, n: int = 512, k: int = 2048, m: int = 32) -> float:
    packed, x = random_packed(layout, n, k), torch.randn(m, k)
    exact = x.double() @ packing.dequantize(*packed, layout, n, k).double().t()
    return ((qlinear(x, *packed, None, layout, n, k) - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", help="NxK,... instead of the two models'")
    parser.add_argument("--rows", default="1,4,16,128")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cold-mb", type=int, default=64)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shapes = SHAPES
    if args.shapes:
        shapes = {text: tuple(map(int, text.split("x"))) for text in args.shapes.split(",")}
    read = bandwidth(args.repeats)
    backend = dispatch.explain("qlinear", "cpu")
    print(
        f"{args.threads} threads, {native.isa()}, qlinear: {backend}, read bandwidth {read / 1e9:.1f} GB/s\n"
    )
    errors = {name: error(layout) for name, layout in LAYOUTS.items()}
    print(f"{'layout':14} {'bits/weight':>11} {'error':>9}")
    for name, layout in LAYOUTS.items():
        print(f"{name:14} {layout.bytes(2048, 2048) * 8 / 2048**2:11.3f} {errors[name]:9.2e}")
    rows = []
    for shape, (n, k) in shapes.items():
        for m in map(int, args.rows.split(",")):
            kinds = list(variants(n, k, m, args.cold_mb << 20))
            for _, _, functions in kinds:
                functions[0]()
            samples = {name: [] for name, _, _ in kinds}
            for _ in range(args.repeats):
                for name, _, functions in kinds:
                    samples[name].append(seconds(functions))
            base = statistics.median(samples["torch bf16"])
            head = f"{shape} [{n}, {k}], rows {m}"
            print(f"\n{head:40} {'us':>9} {'GB/s':>8} {'of read':>7} {'GFLOP/s':>9} {'x torch bf16':>13}")
            for name, size, _ in kinds:
                t = statistics.median(samples[name])
                rows.append(
                    {"shape": [n, k], "rows": m, "variant": name, "seconds": samples[name], "bytes": size}
                )
                print(
                    f"    {name:36} {t * 1e6:9.0f} {size / t / 1e9:8.1f} {size / t / read:7.0%} "
                    f"{2 * m * n * k / t / 1e9:9.0f} {base / t:13.2f}"
                )
    if args.json:
        with open(args.json, "w") as file:
            result = {"threads": args.threads, "isa": native.isa(), "read_bytes_per_s": read, "error": errors}
            json.dump(result | {"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
