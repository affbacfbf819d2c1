"""Machine code of the CUDA kernels without nvcc.

NVRTC, which comes with torch, compiles it when it is first needed; it is kept on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import native

FLAGS = ("-std=c++17", "-default-device", "-fmad=false", "-w")
# What the kernels take from the standard library, which NVRTC does not have.
HEADERS = {
    "cstddef": "namespace std { using size_t = decltype(sizeof 0); }",
    "cstdint": """
        using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
        using uint8_t = unsigned char; using uint16_t = unsigned short;
        using uint32_t = unsigned; using uint64_t = unsigned long;
        using uintptr_t = unsigned long;""",
    "cstring": "",  # memcpy is built in
    "type_traits": """namespace std {
        template <class T, T x> struct integral_constant { static constexpr T value = x; };
        using true_type = integral_constant<bool, true>; using false_type = integral_constant<bool, false>;
        template <bool, class Yes, class No> struct conditional { using type = Yes; };
        template <class Yes, class No> struct conditional<false, Yes, No> { using type = No; };
        template <bool which, class Yes, class No> using conditional_t = typename conditional<which, Yes, No>::type;
        template <class, class> constexpr bool is_same_v = false;
        template <class T> constexpr bool is_same_v<T, T> = true;
    }""",
}


def compiled(kernel: str, device: int) -> tuple[bytes, bytes]:
    """The symbol and the machine code of a kernel, named as in C++.

    ``device``: the GPUs' compute capability (90 for 9.0).

    Raises RuntimeError if it does not compile. A folder that is not accessible costs only time.
    """
    arch, source = _arch(device), _source()
    key = hashlib.sha256(repr((kernel, arch, _version(), FLAGS, HEADERS, source)).encode()).hexdigest()
    path = native.places()[-1] / "nvrtc" / key
    with contextlib.suppress(OSError):
        digest, kept = (held := path.read_bytes())[:32], held[32:]
        if hashlib.sha256(kept).digest() == digest:
            symbol, _, code = kept.partition(b"\0")
            return symbol, code
    symbol, code = _compile(source, kernel, arch)
    _keep(path, symbol + b"\0" + code)
    return symbol, code


def why_not_on(capabilities: Iterable[tuple[int, int]]) -> str | None:
    """None if NVRTC compiles for all these compute capabilities, else the reason and the remedy."""
    try:
        for major, minor in capabilities:
            _arch(10 * major + minor)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


@functools.cache
def _source() -> bytes:
    """The kernels as one text: each header of ours in the place of its first #include."""
    seen: set[Path] = set()

    def text(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        plain = path.read_text().replace("#pragma once\n", "")
        return re.sub(r'^#include "(.+)"$', lambda found: text((path.parent / found[1]).resolve()), plain, flags=re.M)

    names = "using namespace fusedaccum;\nusing namespace fusedaccum::cuda;\n"
    return (text(native.SOURCE / "csrc/cuda/kernels.inc.h") + names).encode()


def _keep(path: Path, kept: bytes) -> None:
    """Under another name until it is whole. Not read back: network file systems may lack it yet."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(kept).digest() + kept)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}")  # which importing torch has loaded


def _call(name: str, *arguments: Any) -> None:
    error = getattr(_library(), name)(*arguments)
    if error:
        _library().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {_library().nvrtcGetErrorString(error).decode()}")


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _arch(device: int) -> int:
    """The newest GPUs that NVRTC knows whose machine code runs on this one.

    They are of the same major version, and no newer.
    """
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", known)
    fitting = [arch for arch in known if arch // 10 == device // 10 and arch <= device]
    if not fitting:
        version = ".".join(map(str, _version()))
        raise RuntimeError(
            f"NVRTC of CUDA {version} knows no GPUs of compute capability {device / 10}; use another torch"
        )
    return max(fitting)


def _compile(source: bytes, kernel: str, arch: int) -> tuple[bytes, bytes]:
    def output(what: str) -> bytes:
        size = ctypes.c_size_t()
        _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        _call(f"nvrtcGet{what}", program, text)
        return text.raw

    def strings(of: Iterable[str]) -> Any:
        texts = [text.encode() for text in of]
        return (ctypes.c_char_p * len(texts))(*texts)

    program, symbol = ctypes.c_void_p(), ctypes.c_char_p()
    headers = len(HEADERS), strings(HEADERS.values()), strings(HEADERS)
    _call("nvrtcCreateProgram", ctypes.byref(program), source, b"kernels.cu", *headers)
    try:
        _call("nvrtcAddNameExpression", program, kernel.encode())
        options = strings((*FLAGS, f"-arch=sm_{arch}"))
        try:
            _call("nvrtcCompileProgram", program, len(options), options)
        except RuntimeError as error:
            log = output("ProgramLog").rstrip(b"\0").decode().strip().splitlines()
            raise RuntimeError("\n".join([f"{error}, of {kernel} for sm_{arch}", *log[:6]])) from None
        _call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(symbol))
        return symbol.value or b"", output("CUBIN")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))
