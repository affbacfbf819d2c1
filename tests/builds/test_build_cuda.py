"""The CUDA extension, where it was compiled: it imports without a GPU, and its machine code is what the source intends."""

import functools
import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fusedaccum import native

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("_cuda" not in native.build().built, reason="the CUDA extension was not built here"),
]


def cuobjdump():
    """The path of cuobjdump: the toolkit's, or the one that comes with Triton."""
    folders = [Path(shutil.which("nvcc") or "nvcc").parent]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return shutil.which("cuobjdump") or next(
        (str(f / "cuobjdump") for f in folders if (f / "cuobjdump").exists()), None
    )


@functools.cache
def kernels():
    """(arch, kernel) -> machine code."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump")
    library = importlib.import_module("fusedaccum._cuda").__file__
    text = subprocess.run([tool, "-sass", library], check=True, capture_output=True, text=True).stdout
    found = {}
    for part in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        arch = part.split(maxsplit=1)[0]
        for function in part.split("Function : ")[1:]:
            found[arch, function.split(maxsplit=1)[0]] = function
    return found


def test_cuda_extension_imports_without_a_gpu():
    assert native.why_missing("_cuda") is None
    extension = importlib.import_module("fusedaccum._cuda")
    assert callable(extension.accumulate_)
    assert extension.NEEDS_DRIVER == 12010
    assert extension.driver() >= 12010 or not torch.cuda.is_available()  # a GPU may be hidden, its driver is there


def test_cuda_backend_without_a_gpu_says_so():
    from fusedaccum.ops import backends

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="backend='cuda' is not available: torch finds no CUDA device"):
        backends.check("cuda")


def test_every_kernel_was_compiled_for_every_arch():
    archs = {arch for arch, _ in kernels()}
    _, *asked = re.findall(r"\d+\.\d+[af]?", native.build().built["_cuda"])  # CUDA's version, and for which GPUs
    assert archs == {f"sm_{number.replace('.', '')}" for number in asked}
    for arch in archs:
        names = [name for found, name in kernels() if found == arch]
        # 16 pairs of dtypes, and the 8 with 16-bit outputs again for stochastic rounding; each adds or overwrites, with or without stats.
        assert len([name for name in names if "write_kernel" in name]) == 2 * 2 * (16 + 8)
        assert len([name for name in names if "stats_kernel" in name]) == 4
        assert len([name for name in names if "add_up_kernel" in name]) == 1
        # For low parts of 8 bits and of 16: adds and overwrites from, and casts to, 2 dtypes, scales, all with or without stats; and stats.
        assert len([name for name in names if "parts_kernel" in name]) == 2 * (2 * 2 * 2 + 2 * 2 + 2 + 1)


def work_loops(code):
    """The instructions of the loop over whole tiles, known by its 16-byte accesses; several lists if nvcc made several loops of it."""
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
    """Which of overwrite, stochastic and stats a writing kernel was compiled for, from the template arguments in its mangled name."""
    names = ("overwrite", "stochastic", "stats")
    return {name for name, flag in zip(names, re.findall(r"Lb([01])E", kernel)) if flag == "1"}


def itemsizes(kernel):
    """Bytes of an element of the output and the input, or of the input alone, from the template arguments in the mangled name."""
    arguments = re.search(r"_kernelI(.*?)(?:Lb|EEv)", kernel)[1]
    return [{"d": 8, "f": 4}.get(name, 2) for name in re.findall(r"NS\d*_4[BF][FP]16E|S\d*_|d|f", arguments)]


def working_kernels(found):
    """(arch, kernel) and its work loops, for all kernels except the one that adds up partial sums."""
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
    """Are four loads (two when overwriting) under way before the first store waits for any of them?"""
    first_store = next((k for k, text in enumerate(loop) if "STG" in text), None)
    return len(widths(loop[:first_store], "LDG")) >= (2 if "overwrite" in flags(kernel) else 4)


@pytest.mark.parametrize("holds", [moves_packs, loads_together])
def test_in_whole_tiles(holds):
    for (arch, kernel), loops in working_kernels(kernels()):
        for loop in loops:
            assert holds(kernel, loop), (arch, kernel)


def test_loads_and_stores_are_weak():
    """No access orders others, as strong ones do; hints of a cache level can make one strong (``__stwb``: STG.E.128.STRONG.SM)."""
    for key, code in kernels().items():
        assert not re.search(r"\b(LDG|STG)\S*\.STRONG\b", code), key


# A GPU of each kind, from its data sheet: memory bytes per second, multiprocessors, clocks per second.
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


def test_computing_takes_less_time_than_the_bytes():
    """By instruction count: a kernel that issued one in most clocks would no longer be limited by memory alone."""
    for (arch, kernel), loops in working_kernels(kernels()):
        if arch in GPUS and "stochastic" not in flags(kernel):
            assert max(busy(arch, loop) for loop in loops) < 0.6, (arch, kernel)


def test_numbers_in_two_parts_move_in_packs_and_compute_for_less_time_than_that_takes():
    """On an H200, beside 8 bits too, whose bytes have to be taken out of registers one by one."""
    for (arch, kernel), code in kernels().items():
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


def test_random_numbers_take_about_the_time_of_the_bytes():
    """On an H200; into FP16, whose subnormals need a rounding of their own, half as much again."""
    for (arch, kernel), loops in working_kernels(kernels()):
        if arch == "sm_90" and "stochastic" in flags(kernel):
            limit = {"BF16": 1.2, "FP16": 1.7}[re.search(r"kernelINS\d*_4(BF16|FP16)E", kernel)[1]]
            assert max(busy(arch, loop) for loop in loops) < limit, kernel


def test_cuda_kernels_use_no_local_memory():
    for key, code in kernels().items():
        assert not re.search(r"\b(LDL|STL)\b", code), key


def test_cuda_kernels_never_contract_a_product_and_a_sum():
    for key, code in kernels().items():
        assert not re.search(r"\b[FD]FMA\b", code), key


# -- that these checks can fail, and what the build leaves out -----------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "sound", "fault", "holds"),
    [
        ("elements.h", "store_whole(reinterpret_cast<Whole*>(to), ", "*reinterpret_cast<Whole*>(to) = (", moves_packs),
        ("kernels.cu", "kPacks = 2;", "kPacks = 1;", loads_together),
    ],
    ids=["a plain store", "one pack a thread"],
)
def test_planted_faults_show_in_the_loops(file, sound, fault, holds, tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    path = tmp_path / "csrc/cuda" / file
    assert sound in path.read_text()
    path.write_text(path.read_text().replace(sound, fault))
    code = compiled(tmp_path, "sm_90", "-fmad=false", source=tmp_path / "csrc/cuda/kernels.cu")
    faulty = working_kernels({("sm_90", f.split()[0]): f for f in code.split("Function : ")[1:]})
    assert not all(holds(kernel, loop) for (_, kernel), loops in faulty for loop in loops)
