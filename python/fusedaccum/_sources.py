"""Which C++ and CUDA sources the extensions were built from. Also run by setup.py, so it imports nothing of the package."""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """A digest of all files in ``folder``, and of their names."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(name.encode() + (folder / name).read_bytes() for name in names)).hexdigest()
