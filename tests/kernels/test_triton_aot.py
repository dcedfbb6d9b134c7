"""Every Triton kernel and launch config, compiled for GPUs that are not here. Nothing runs."""

import functools
import importlib
import re
import subprocess
import tempfile

import pytest

triton = pytest.importorskip("triton")

from hfaccel_kernels import (  # noqa: E402
    OPS,
    aot,
    dispatch,
    triton_activations,
    triton_linear,
    triton_lora,
    triton_paged,
    triton_split,
)
from hfaccel_kernels.triton_support import Config  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.slow]


@functools.cache
def built(capability: int) -> list[aot.Machine]:
    """What became of the launches of every op; on the oldest GPU of the rarer ones too, and where registers
    are short for those of attention and LoRA."""
    found = list(aot.build(capability).values())
    if capability == 80:
        found += aot.build(80, aot.MORE).values()
    if capability == 120:
        found += aot.build(120, {op: aot.MORE[op] for op in ("paged_attention", "lora_add")}).values()
    machines = [machine for per_op in found for machine in per_op]
    print("", *machines, sep="\n")
    return machines


def of(capability, kernel, **constants):
    """The launches of a kernel whose constants are these."""
    return [
        m
        for m in built(capability)
        if m.launch.name == kernel and constants.items() <= m.launch.constants.items()
    ]


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_no_spills_and_shared_memory_fits(capability):
    assert built(capability)
    unfit = [f"{m}: {', '.join(m.faults)}" for m in built(capability) if m.faults]
    assert not unfit, "\n".join(unfit)


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_every_config_of_every_table_is_compiled(capability):
    def assert_compiled(kernel, config: Config, **constants):
        assert of(capability, kernel, num_warps=config.num_warps, **constants), (kernel, config)

    for bits, config in triton_linear.GEMV.items():
        assert_compiled("_gemv", config, BITS=bits, STEPS=config.tile[0], STAGES=config.num_stages)
    for table in triton_linear.GEMM.values():
        for _, config in table:
            bm, bn, bk = config.tile
            assert_compiled("_gemm", config, BM=bm, BN=bn, BK=bk, STAGES=config.num_stages)
    assert_compiled("_round", triton_activations.ROUND, BLOCK=triton_activations.ROUND.tile[0])
    assert_compiled("_combine", triton_split.COMBINE, BLOCK=triton_split.COMBINE.tile[0])
    assert_compiled("_write", triton_paged.WRITE, TOKENS=triton_paged.WRITE.tile[0])
    for size, (tokens, each) in triton_lora.TILES.items():
        tile = {"TOKENS": tokens, "EACH": each}
        for config in triton_lora.SHRINK[size].values():
            bk, br = config.tile
            assert_compiled("_shrink", config, **tile, BK=bk, BR=br, STAGES=config.num_stages)
        config = triton_lora.EXPAND[size]
        bn, br = config.tile
        assert_compiled("_expand", config, **tile, BN=bn, BR=br, num_stages=config.num_stages)
    for tables in (triton_paged.DECODE, triton_paged.PREFILL):
        for table in tables.values():
            chosen = {}  # by head size: the first that this GPU may use
            for size, least, config in table:
                if capability >= least:
                    chosen.setdefault(size, config)
            for size, config in chosen.items():
                rows, keys = config.tile
                assert_compiled(
                    "_attend", config, BLOCK_D=size, ROWS=rows, KEYS=keys, num_stages=config.num_stages
                )


def test_what_is_compiled_is_what_ops_offer():
    for target in OPS.values():
        importlib.import_module(target.partition(":")[0])
    offered = {op for op in OPS if any(b.name == "triton" for b in dispatch.backends(op))}
    assert offered == set(aot.CASES) == set(aot.MORE)
    modules = (triton_activations, triton_linear, triton_lora, triton_paged, triton_split)
    sources = [(m, open(m.__file__).read()) for m in modules]
    launched = {
        (m.__name__, name) for m, text in sources for name in re.findall(r"^ *(_\w+)\[\(", text, re.M)
    }
    assert len(launched) == 9
    for capability in aot.CAPABILITIES:
        compiled = {(m.launch.module, m.launch.name) for m in built(capability)}
        assert compiled == launched


@pytest.mark.parametrize("capability", aot.CAPABILITIES)
def test_loads_are_wide_and_products_run_on_tensor_cores(capability):
    for kernel in ("_gemv", "_gemm", "_attend"):
        # rows and groups of odd sizes cannot be loaded 16 bytes at a time
        whole = [m for m in of(capability, kernel) if not m.launch.constants.get("GAPS")]
        assert whole and all(m.wide_loads and m.async_copies for m in whole), "\n".join(map(str, whole))
    for kernel in ("_shrink", "_expand"):
        whole = [m for m in of(capability, kernel) if m.launch.constants["BR"] > 16]
        assert whole and all(m.wide_loads for m in whole), "\n".join(map(str, whole))
    for kernel in ("_gemm", "_attend", "_shrink", "_expand"):
        assert all(m.mma or m.wgmma or m.tcgen05 for m in of(capability, kernel))


def test_warpgroup_products_on_hopper():
    for m in of(90, "_gemm"):
        assert (m.wgmma > 0) == (m.launch.constants["BM"] >= 64), str(m)
    assert all(m.wgmma for m in of(90, "_attend") if m.launch.constants["ROWS"] >= 64)


def test_fusion_of_multiply_and_add_is_pinned():
    """Triton's default changes between releases. Codes of x, K and V are rounded as the reference rounds."""
    for m in built(80):
        assert m.launch.constants["enable_fp_fusion"] == (m.launch.name not in ("_write", "_round")), str(m)


def test_a_kernel_that_spills_is_found(monkeypatch):
    """And its loads and stores of local memory are those that the disassembler names."""
    monkeypatch.setitem(triton_paged.PREFILL, "half", ((256, 80, Config((128, 64), 4, 2)),))
    with aot.compiling(90) as launches:
        aot.CASES["paged_attention"][7]()
    machine = aot.inspect(launches[0])
    assert machine.launch.constants["BLOCK_D"] == 256
    assert machine.spills and any("spills" in fault for fault in machine.faults)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launches[0].kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert machine.spills == len(re.findall(r"\b(?:LDL|STL)\b", text))


def test_shared_memory_over_the_limit_is_found(monkeypatch):
    monkeypatch.setitem(triton_linear.GEMM, "half", ((None, Config((128, 128, 128), 8, 6)),))
    (machine,) = aot.build(80, {"qlinear": [aot.CASES["qlinear"][7]]})["qlinear"]
    assert machine.launch.constants["BM"] == 128
    assert any("shared memory" in fault for fault in machine.faults)


def test_nothing_stays_behind():
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = driver._active, JITFunction.run, dispatch.forced()
    with pytest.raises(ZeroDivisionError), aot.compiling(80):
        assert dispatch.forced() == "triton"
        raise ZeroDivisionError
    assert (driver._active, JITFunction.run, dispatch.forced()) == before
