"""The Triton kernels' machine code, for GPUs that need not be here, is what the source intends."""

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs Triton's compiler",
    ),
]

DTYPES = ("fp64", "fp32", "bf16", "fp16")
PAIRS = [(out, x) for out in DTYPES for x in DTYPES]
WITHOUT_LOW = {"BITS": 0, "LOW_ALIGNED": False, "LOW_WRITTEN": False}
ADD = {"CAST": False, "OVERWRITE": False, "STOCHASTIC": False, "STATS": False}
MODES = {
    "add": ADD,
    "overwrite": ADD | {"OVERWRITE": True},
    "add with statistics": ADD | {"STATS": True},
    "cast with statistics": ADD | {"CAST": True, "OVERWRITE": True, "STATS": True},
}


AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}  # MI200, MI300, RX 7900: the threads of a warp


@functools.cache
def compiled(target, kernel, constants, fuse=False):
    """What Triton compiles a kernel to, by kind; ``target`` is as GPUTarget has it."""
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
              if name.endswith("DTYPE") else v for name, v in constants} | {"BLOCK": backend.BLOCK}  # fmt: skip
    chosen = {k: v for k, v in WITHOUT_LOW.items() if k in function.arg_names} | chosen
    signature = {name: "constexpr" if name in chosen else arguments[name] for name in function.arg_names}
    source = ASTSource(
        function, signature=signature, constexprs={(function.arg_names.index(k),): v for k, v in chosen.items()}
    )
    options = backend.OPTIONS | ({"enable_fp_fusion": True} if fuse else {})
    return triton.compile(source, target=GPUTarget(*target), options=options).asm


@functools.cache
def disassembled(cubin):
    """NVIDIA's machine code, readable."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("needs the cuobjdump that comes with Triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout


def writing(target, out, x, mode, aligned=True, fuse=False):
    constants = {"OUT_DTYPE": out, "IN_DTYPE": x, "ALIGNED": aligned, **mode}
    return compiled(target, "write", tuple(constants.items()), fuse)


def measuring(target, x):
    return compiled(target, "measure", (("IN_DTYPE", x), ("ALIGNED", True)))


def nvidia(capability, *case, **options):
    """The machine code of a kernel that writes."""
    return disassembled(writing(("cuda", capability, 32), *case, **options)["cubin"])


def amd(architecture, *case, **options):
    return writing(("hip", architecture, AMD[architecture]), *case, **options)["amdgcn"]


def count(sass, access, width):
    """How many global loads (LDG) or stores (STG) of so many bytes a thread there are."""
    suffix = {2: r"\.U16", 4: "", 8: r"\.64", 16: r"\.128"}[width]
    return len(re.findall(rf"\b{access}\.E{suffix} ", sass))


def wide_accesses(sass):
    return len(re.findall(r"\bLDG\.E\.128", sass)), len(re.findall(r"\bSTG\.E\.128", sass))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_triton_kernel_compiles_to_16_byte_accesses(capability, mode):
    sass = nvidia(capability, "fp32", "bf16", MODES[mode])
    assert count(sass, "STG", 16) > 0
    assert count(sass, "LDG", 16) > 0 or MODES[mode]["OVERWRITE"]  # of what is overwritten
    assert count(sass, "LDG", 8) > 0  # of BF16: as many elements
    assert not re.search(r"\b(LDL|STL)\b", sass), "local memory"


def amd_accesses(code):
    """The bytes a thread moves at once, of all global (loads, stores)."""
    width = {"dwordx4": 16, "b128": 16, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}  # others are of one 16-bit number
    found = [re.findall(rf"\bglobal_{way}_(\w+)", code) for way in ("load", "store")]
    return [{width.get(name, 2) for name in names} for names in found]


def amd_contractions(code):
    """Products not rounded before something is added.

    Those of -1, and those to which -0 is added (so is FP16 multiplied), are fine.
    """
    return re.findall(r"\bv_(?:pk_)?(?:fma|mac|fmac|mad)\w*(?!.* (?:neg\(0\)|-1\.0)).*", code)


def in_registers(code):
    return ".private_segment_fixed_size: 0" in code and not re.search(r"_spill_count: +[1-9]", code)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", AMD)
def test_for_amd_too_accesses_are_of_16_bytes(architecture, mode):
    code = amd(architecture, "fp32", "bf16", MODES[mode])
    loads, stores = amd_accesses(code)
    assert 16 in stores
    assert 8 in loads
    assert 16 in loads or MODES[mode]["OVERWRITE"]
    assert in_registers(code)


@pytest.mark.parametrize(("out", "x"), PAIRS)
def test_for_amd_too_every_dtype_pair_moves_packs_without_contraction(out, x):
    code = amd("gfx942", out, x, ADD)
    sizes = [{"fp64": 8, "fp32": 4}.get(name, 2) for name in (out, x)]
    write_width, read_width = (16 * size // max(sizes) for size in sizes)
    loads, stores = amd_accesses(code)
    assert write_width in stores
    assert {write_width, read_width} <= loads
    assert not amd_contractions(code)
    assert not re.search(r"\bs_barrier\b|\bds_", code), "threads exchange elements"
    assert in_registers(code)


@pytest.mark.parametrize("architecture", AMD)
def test_for_amd_too_stochastic_rounding_and_measuring_compile(architecture):
    for out in ("bf16", "fp16"):
        code = amd(architecture, out, "bf16", ADD | {"STOCHASTIC": True})
        assert 16 in set.intersection(*amd_accesses(code))
        assert not amd_contractions(code)
        assert in_registers(code)
    for x in DTYPES:
        code = measuring(("hip", architecture, AMD[architecture]), x)["amdgcn"]
        assert 16 in amd_accesses(code)[0]
        assert not amd_contractions(code)
        assert in_registers(code)


@pytest.mark.parametrize(("out", "x"), PAIRS)
def test_every_dtype_pair_moves_packs_without_contraction(out, x):
    """Both sides move as many elements as fit 16 bytes of the wider: threads exchange nothing."""
    sass = nvidia(90, out, x, ADD)
    sizes = [{"fp64": 8, "fp32": 4}.get(name, 2) for name in (out, x)]
    write_width, read_width = (16 * size // max(sizes) for size in sizes)
    assert min(count(sass, "LDG", write_width), count(sass, "LDG", read_width), count(sass, "STG", write_width)) > 0
    assert not re.search(r"\b[FD]FMA\b", sass)
    assert not re.search(r"\bBAR\b", sass), "threads exchange elements"


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("mode", MODES)
def test_numbers_in_two_parts_move_in_packs_without_contraction(mode, bits):
    """BF16 and BF16: 8 elements at a time, 8 or 16 bytes of low parts."""
    low = {"BITS": bits, "LOW_ALIGNED": True, "LOW_WRITTEN": not MODES[mode]["CAST"]}
    sass = nvidia(90, "bf16", "bf16", MODES[mode] | low)
    assert min(count(sass, "LDG", 16), count(sass, "STG", 16)) > 0
    assert MODES[mode]["CAST"] or count(sass, "STG", bits) > 0
    assert MODES[mode] == MODES["overwrite"] or count(sass, "LDG", bits) > 0
    assert not re.search(r"\b[F]FMA\b", sass)
    assert not re.search(r"\b(LDL|STL)\b", sass), "local memory"
    assert not re.search(r"\bBAR\b", sass) or MODES[mode]["STATS"], "threads exchange elements"


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_stochastic_rounding_compiles(out):
    sass = nvidia(90, out, "bf16", ADD | {"STOCHASTIC": True})
    assert min(wide_accesses(sass)) > 0


@pytest.mark.parametrize("x", DTYPES)
def test_measuring_compiles_to_16_byte_loads_without_contraction(x):
    sass = disassembled(measuring(("cuda", 90, 32), x)["cubin"])
    assert wide_accesses(sass)[0] > 0
    assert not re.search(r"\b[FD]FMA\b", sass)


def test_these_checks_can_fail():
    """With planted faults: misaligned pointers, and contraction allowed."""
    misaligned = nvidia(90, "fp32", "bf16", ADD, aligned=False)
    assert wide_accesses(misaligned) == (0, 0)
    fused = nvidia(90, "fp32", "bf16", ADD, fuse=True)
    assert re.search(r"\bFFMA\b", fused)
    assert 16 not in set.union(*amd_accesses(amd("gfx942", "fp32", "bf16", ADD, aligned=False)))
    for x in ("bf16", "fp16"):
        assert amd_contractions(amd("gfx942", "fp32", x, ADD, fuse=True))
