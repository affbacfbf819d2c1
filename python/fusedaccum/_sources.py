"""The C++ and CUDA sources that the extensions are built from. Also run by setup.py, so it imports nothing of the package."""

import hashlib
import re
from pathlib import Path


def digest(folder: Path) -> str:
    """A digest of all files in ``folder``, and of their names."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(name.encode() + (folder / name).read_bytes() for name in names)).hexdigest()


def device_code(folder: Path) -> str:
    """The CUDA kernels as one text, for NVRTC: each header of ours in the place of its first #include."""
    seen: set[Path] = set()

    def text(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        plain = path.read_text().replace("#pragma once\n", "")
        return re.sub(r'^#include "(.+)"$', lambda found: text((path.parent / found[1]).resolve()), plain, flags=re.M)

    return (
        text((folder / "cuda/kernels.inc.h").resolve())
        + "using namespace fusedaccum;\nusing namespace fusedaccum::cuda;\n"
    )
