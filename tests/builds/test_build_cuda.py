"""The CUDA extension, where nvcc compiled it, imports without a GPU.

Its machine code, and NVRTC's, is what the source intends.
"""

import functools
import importlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from fusedaccum import native, nvrtc

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.long

built = pytest.mark.skipif(
    native.build().cuda_archs in ("", "nvrtc"), reason="the CUDA extension was not built here by nvcc"
)
bundled = pytest.mark.skipif(torch.version.cuda is None, reason="a torch without NVRTC")
# nvcc has compiled for several GPUs; NVRTC compiles for one at a time.
every_compiler = pytest.mark.parametrize(
    "compiler",
    [
        pytest.param("nvcc", marks=built),
        *(pytest.param(arch, marks=bundled) for arch in (80, 90, 100)),
        *(pytest.param(arch, marks=[bundled, pytest.mark.slow]) for arch in (75, 120)),
    ],
)


def cuobjdump():
    """The path of cuobjdump: the toolkit's, or the one that comes with Triton."""
    folders = [Path(shutil.which("nvcc") or "nvcc").parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return shutil.which("cuobjdump") or next(
        (str(f / "cuobjdump") for f in folders if (f / "cuobjdump").exists()), None
    )


def instantiations():
    """Every kernel, as NVRTC knows it by name."""
    flags = ("false", "true")
    dtypes = ("double", "float", "BF16", "FP16")
    for out, x, overwrite, stochastic, stats in itertools.product(dtypes, dtypes, flags, flags, flags):
        if stochastic == "false" or out in ("BF16", "FP16"):
            yield f"write_kernel<{out}, {x}, {overwrite}, {stochastic}, {stats}>"
    yield from (f"stats_kernel<{x}>" for x in dtypes)
    for low, stats in itertools.product(("int8_t", "int16_t"), flags):
        for other in ("float", "BF16"):
            yield from (
                f"parts_kernel<static_cast<Op>(0), {low}, {other}, {overwrite}, {stats}>" for overwrite in flags
            )
            yield f"parts_kernel<static_cast<Op>(1), {low}, {other}, true, {stats}>"
        yield f"parts_kernel<static_cast<Op>(3), {low}, BF16, true, {stats}>"
    yield from (f"parts_kernel<static_cast<Op>(2), {low}, BF16, true, true>" for low in ("int8_t", "int16_t"))
    yield "add_up_kernel"


def of_nvrtc(arch):
    """All kernels in one module, for this compute capability."""
    argument = "const __grid_constant__ Batch"
    every = "".join(f"template __global__ void {name}({argument});\n" for name in instantiations() if "<" in name)
    source = f"{nvrtc._source().decode()}namespace fusedaccum::cuda {{ namespace {{\n{every}}} }}"
    return nvrtc._compile(source.encode(), "add_up_kernel", arch)[1]


@functools.cache
def kernels(compiler):
    """(arch, kernel) -> machine code."""
    if compiler == "nvcc":
        return machine_code(Path(importlib.import_module("fusedaccum._cuda").__file__).read_bytes())
    return machine_code(of_nvrtc(compiler))


def machine_code(binary):
    """(arch, kernel) -> machine code, of a cubin or of a library with some in it."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    with tempfile.NamedTemporaryFile() as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    found = {}
    for part in re.split(r"^\s*code for ", text, flags=re.MULTILINE)[1:]:
        arch = part.split(maxsplit=1)[0]
        for function in part.split("Function : ")[1:]:
            found[arch, function.split(maxsplit=1)[0]] = function
    assert found
    return found


@built
def test_cuda_extension_imports_without_a_gpu():
    assert native.why_missing("_cuda") is None
    extension = importlib.import_module("fusedaccum._cuda")
    assert callable(extension.accumulate_)
    assert extension.NEEDS_DRIVER == 12010
    assert extension.driver() >= 12010 or not torch.cuda.is_available()  # a GPU may be hidden, its driver is there


@built
def test_cuda_backend_without_a_gpu_says_so():
    from fusedaccum.ops import backends

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="backend='cuda' is not available: torch finds no CUDA device"):
        backends.check("cuda")


@every_compiler
def test_every_kernel_was_compiled_for_every_arch(compiler):
    archs = {arch for arch, _ in kernels(compiler)}
    asked = re.findall(r"(\d+)\.(\d+[af]?)", native.build().cuda_archs) if compiler == "nvcc" else [(compiler, "")]
    assert archs == {f"sm_{major}{minor}" for major, minor in asked}
    for arch in archs:
        names = [name for found, name in kernels(compiler) if found == arch]
        assert len(names) == len(list(instantiations()))
        # 16 pairs of dtypes, and the 8 with 16-bit outputs again for stochastic rounding; each adds
        # or overwrites, with or without stats.
        assert len([name for name in names if "write_kernel" in name]) == 2 * 2 * (16 + 8)
        assert len([name for name in names if "stats_kernel" in name]) == 4
        assert len([name for name in names if "add_up_kernel" in name]) == 1
        # For low parts of 8 bits and of 16: adds and overwrites from, and casts to, 2 dtypes,
        # scales, all with or without stats; and stats.
        assert len([name for name in names if "parts_kernel" in name]) == 2 * (2 * 2 * 2 + 2 * 2 + 2 + 1)


def work_loops(code):
    """The instructions of each loop that nvcc made over whole tiles, known by 16-byte accesses."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S.*?) *;", code)]
    loops = []
    for at, text in lines:
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if back and (first := int(back[1], 16)) < at:
            loops.append([text for where, text in lines if first <= where <= at])
    return [loop for loop in loops if any(".E.128" in text for text in loop)]


def widths(loop, access):
    """Bytes of each global load (LDG) or store (STG) of a loop."""
    found = [re.search(rf"\b{access}\.E(?:\.(U16|64|128))?\b", text) for text in loop]
    return [{"U16": 2, None: 4, "64": 8, "128": 16}[match[1]] for match in found if match]


def flags(kernel):
    """Which of overwrite, stochastic and stats a writing kernel has, from its mangled name."""
    names = ("overwrite", "stochastic", "stats")
    return {name for name, flag in zip(names, re.findall(r"Lb([01])E", kernel)) if flag == "1"}


def itemsizes(kernel):
    """Bytes per element of output and input, or of the input alone, from the mangled name."""
    arguments = re.search(r"_kernelI(.*?)(?:Lb|EEv)", kernel)[1]
    return [{"d": 8, "f": 4}.get(name, 2) for name in re.findall(r"NS\d*_4[BF][FP]16E|S\d*_|d|f", arguments)]


def working_kernels(found):
    """(arch, kernel) and its work loops, for all kernels but the one that adds up partial sums."""
    for key, code in found.items():
        if "add_up" not in key[1] and "parts" not in key[1]:
            loops = work_loops(code)
            assert loops, key
            yield key, loops


def moves_packs(kernel, loop):
    """Does every access move 16 bytes on the wider side, and as many elements on the other?"""
    sizes = itemsizes(kernel)
    packs = [16 * size // max(sizes) for size in sizes]
    writes, reads_both = "stats_kernel" not in kernel, "overwrite" not in flags(kernel)
    loads, stores = set(packs if reads_both else packs[1:]), set(packs[:1] if writes else ())
    return set(widths(loop, "LDG")) == loads and set(widths(loop, "STG")) == stores


def loads_together(kernel, loop):
    """True if four loads (two to overwrite) are under way before the first store waits for any."""
    first_store = next((k for k, text in enumerate(loop) if "STG" in text), None)
    return len(widths(loop[:first_store], "LDG")) >= (2 if "overwrite" in flags(kernel) else 4)


@pytest.mark.parametrize("holds", [moves_packs, loads_together])
@every_compiler
def test_in_whole_tiles(holds, compiler):
    for (arch, kernel), loops in working_kernels(kernels(compiler)):
        for loop in loops:
            assert holds(kernel, loop), (arch, kernel)


@every_compiler
def test_loads_and_stores_are_weak(compiler):
    """No access orders others, as strong ones do.

    Hints of a cache level can make one strong (``__stwb``: STG.E.128.STRONG.SM).
    """
    for key, code in kernels(compiler).items():
        assert not re.search(r"\b(LDG|STG)\S*\.STRONG\b", code), key


# A GPU of each kind, by data sheet: memory bytes per second, multiprocessors, clocks per second.
GPUS = {
    "sm_80": ("A100 80 GB", 2.04e12, 108, 1.41e9),
    "sm_90": ("H200", 4.8e12, 132, 1.755e9),
    "sm_100": ("B200", 8.0e12, 148, 1.85e9),
    "sm_120": ("RTX 5090", 1.79e12, 170, 2.41e9),
}
ISSUED = 128  # thread instructions that a multiprocessor issues per clock


def busy(arch, loop):
    """The time to issue a loop's instructions, as a share of the time that its bytes take."""
    _, bandwidth, processors, clock = GPUS[arch]
    moved = sum(widths(loop, "LDG")) + sum(widths(loop, "STG"))
    return len(loop) / ISSUED / (moved * processors * clock / bandwidth)


@every_compiler
def test_computing_takes_less_time_than_the_bytes(compiler):
    """By instruction count: a kernel that issues in most clocks is no longer limited by memory."""
    for (arch, kernel), loops in working_kernels(kernels(compiler)):
        if arch in GPUS and "stochastic" not in flags(kernel):
            assert max(busy(arch, loop) for loop in loops) < 0.6, (arch, kernel)


@every_compiler
def test_numbers_in_two_parts_move_in_packs_and_compute_for_less_time_than_that_takes(compiler):
    """On an H200, beside 8 bits too, whose bytes have to be taken out of registers one by one."""
    for (arch, kernel), code in kernels(compiler).items():
        if "parts" not in kernel:
            continue
        op, low, other = re.search(r"OpE(\d)E([as])(f|NS\d*_4BF16E)", kernel).groups()
        count = 4 if other == "f" else 8
        h, parts, others = 2 * count, count * (1 if low == "a" else 2), (4 if other == "f" else 2) * count
        adds, casts, scales = (op == number for number in "013")
        reads = not (adds and "overwrite" in parts_flags(kernel))
        loops = work_loops(code)
        assert loops, (arch, kernel)
        for loop in loops:
            loads = {*((h, parts) if reads else ()), *((others,) if adds else ())}
            stores = {*((h, parts) if adds or scales else ()), *((others,) if casts else ())}
            assert (set(widths(loop, "LDG")), set(widths(loop, "STG"))) == (loads, stores), (arch, kernel)
            assert arch != "sm_90" or busy(arch, loop) < 0.9, kernel


def parts_flags(kernel):
    """Which of overwrite and stats a kernel for numbers in two parts was compiled for."""
    return {
        name for name, flag in zip(("overwrite", "stats"), re.findall(r"Lb([01])E", kernel), strict=True) if flag == "1"
    }


@every_compiler
def test_random_numbers_take_about_the_time_of_the_bytes(compiler):
    """On an H200; into FP16, whose subnormals need a rounding of their own, half as much again."""
    for (arch, kernel), loops in working_kernels(kernels(compiler)):
        if arch == "sm_90" and "stochastic" in flags(kernel):
            limit = {"BF16": 1.2, "FP16": 1.7}[re.search(r"kernelINS\d*_4(BF16|FP16)E", kernel)[1]]
            assert max(busy(arch, loop) for loop in loops) < limit, kernel


@every_compiler
def test_cuda_kernels_use_no_local_memory(compiler):
    for key, code in kernels(compiler).items():
        assert not re.search(r"\b(LDL|STL)\b", code), key


@every_compiler
def test_cuda_kernels_never_contract_a_product_and_a_sum(compiler):
    for key, code in kernels(compiler).items():
        assert not re.search(r"\b[FD]FMA\b", code), key


# -- that these checks can fail, and what the build leaves out -------------------------------------


def compiled(tmp_path, arch, *flags, source=None):
    nvcc = shutil.which("nvcc")
    if nvcc is None or cuobjdump() is None:
        pytest.skip("needs nvcc and cuobjdump")
    cubin = tmp_path / "kernels.cubin"
    command = [nvcc, "-cubin", f"-arch={arch}", "-O3", *flags, "-o", cubin, source or ROOT / "csrc/cuda/kernels.cu"]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([cuobjdump(), "-sass", cubin], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_cuda_kernels_compile_for(arch, tmp_path):
    assert "write_kernel" in compiled(tmp_path, arch, "-fmad=false")


@pytest.mark.parametrize(
    ("fault", "trace"),
    [("x[0] * 3.0f + x[1]", r"\bFFMA\b"), ("array[threadIdx.x]", r"\b(LDL|STL)\b"), ("x[0]", r"^(?!.*\.128)")],
    ids=["contraction", "local memory", "narrow accesses"],
)
def test_planted_faults_show_in_the_machine_code(fault, trace, tmp_path):
    source = tmp_path / "fault.cu"
    source.write_text(
        "__global__ void kernel(float* x) { float array[64]; for (int i = 0; i < 64; ++i) array[int(x[i]) % 64] = i; "
        f"x[blockIdx.x] = {fault}; }}"
    )
    assert re.search(trace, compiled(tmp_path, "sm_90", source=source), re.DOTALL)


@bundled
@pytest.mark.parametrize(
    ("sound", "fault", "holds"),
    [
        ("store_whole(reinterpret_cast<Whole*>(to), ", "*reinterpret_cast<Whole*>(to) = (", moves_packs),
        ("kPacks = 2;", "kPacks = 1;", loads_together),
    ],
    ids=["a plain store", "one pack a thread"],
)
def test_planted_faults_show_in_the_loops(sound, fault, holds):
    source = nvrtc._source().decode()
    assert source.count(sound) == 1
    for text, right in ((source, True), (source.replace(sound, fault), False)):
        _, cubin = nvrtc._compile(text.encode(), "write_kernel<double, double, true, false, true>", 90)
        assert (
            all(holds(kernel, loop) for (_, kernel), loops in working_kernels(machine_code(cubin)) for loop in loops)
            == right
        )
