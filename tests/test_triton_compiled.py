"""The Triton kernels, compiled down to machine code for GPUs that need not be here: the code is what the source intends."""

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)

DTYPES = ("fp64", "fp32", "bf16", "fp16")
PAIRS = [(out, x) for out in DTYPES for x in DTYPES]
ADD = {"CAST": False, "OVERWRITE": False, "STOCHASTIC": False, "STATS": False}
MODES = {
    "add": ADD,
    "overwrite": ADD | {"OVERWRITE": True},
    "add with statistics": ADD | {"STATS": True},
    "cast with statistics": ADD | {"CAST": True, "OVERWRITE": True, "STATS": True},
}


@functools.cache
def machine_code(capability, kernel, constants, fuse=False):
    """(PTX, SASS) of a kernel."""
    import triton
    from fusedaccum.triton_kernels import backend, kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = {
        "table": "*i64",
        "tensors": "i32",
        "scale_at": "*fp64",
        "decay_at": "*fp64",
        "partials": "*fp64",
        "bad": "*i64",
    }
    function = getattr(kernels, kernel)
    chosen = {name: getattr(triton.language, {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[v])
              if name.endswith("DTYPE") else v for name, v in constants}  # fmt: skip
    signature = {name: "constexpr" if name in chosen else arguments[name] for name in function.arg_names}
    source = ASTSource(
        function, signature=signature, constexprs={(function.arg_names.index(k),): v for k, v in chosen.items()}
    )
    options = backend.OPTIONS | ({"enable_fp_fusion": True} if fuse else {})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"], disassembled(compiled.asm["cubin"])


def disassembled(cubin):
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("needs the cuobjdump that comes with Triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout


def write(capability, out, x, mode, aligned=True, fuse=False):
    constants = {"OUT_DTYPE": out, "IN_DTYPE": x, "ALIGNED": aligned, "BLOCK": 4096, **mode}
    return machine_code(capability, "write", tuple(constants.items()), fuse)


def count(sass, access, width):
    """How many global loads (LDG) or stores (STG) of so many bytes a thread there are."""
    suffix = {2: r"\.U16", 4: "", 8: r"\.64", 16: r"\.128"}[width]
    return len(re.findall(rf"\b{access}\.E{suffix} ", sass))


def wide_accesses(sass):
    return len(re.findall(r"\bLDG\.E\.128", sass)), len(re.findall(r"\bSTG\.E\.128", sass))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_triton_kernel_compiles_to_16_byte_accesses(capability, mode):
    _, sass = write(capability, "fp32", "bf16", MODES[mode])
    assert count(sass, "STG", 16) > 0
    assert count(sass, "LDG", 16) > 0 or MODES[mode]["OVERWRITE"]  # of what is overwritten
    assert count(sass, "LDG", 8) > 0  # of BF16: as many elements
    assert not re.search(r"\b(LDL|STL)\b", sass), "local memory"


@pytest.mark.parametrize(("out", "x"), PAIRS)
def test_every_dtype_pair_moves_packs_without_contraction(out, x):
    """As many elements at a time on both sides as there are in 16 bytes of the wider one, so that threads exchange nothing."""
    _, sass = write(90, out, x, ADD)
    sizes = [{"fp64": 8, "fp32": 4}.get(name, 2) for name in (out, x)]
    write_width, read_width = (16 * size // max(sizes) for size in sizes)
    assert min(count(sass, "LDG", write_width), count(sass, "LDG", read_width), count(sass, "STG", write_width)) > 0
    assert not re.search(r"\b[FD]FMA\b", sass)
    assert not re.search(r"\bBAR\b", sass), "threads exchange elements"


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_stochastic_rounding_compiles(out):
    _, sass = write(90, out, "bf16", ADD | {"STOCHASTIC": True})
    assert min(wide_accesses(sass)) > 0


@pytest.mark.parametrize("x", DTYPES)
def test_measuring_compiles_to_16_byte_loads_without_contraction(x):
    _, sass = machine_code(90, "measure", (("IN_DTYPE", x), ("ALIGNED", True), ("BLOCK", 4096)))
    assert wide_accesses(sass)[0] > 0
    assert not re.search(r"\b[FD]FMA\b", sass)


def test_these_checks_can_fail():
    """With planted faults: misaligned pointers, and contraction allowed."""
    _, misaligned = write(90, "fp32", "bf16", ADD, aligned=False)
    assert wide_accesses(misaligned) == (0, 0)
    _, fused = write(90, "fp32", "bf16", ADD, fuse=True)
    assert re.search(r"\bFFMA\b", fused)
