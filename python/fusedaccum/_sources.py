"""Which sources and flags the extensions were built from.

Also run by setup.py, so it imports nothing of the package.
"""

import hashlib
from pathlib import Path


def digest(root: Path) -> str:
    """A digest of setup.py, which has the flags, of all files in csrc, and of their names."""
    files = [root / "setup.py", *(path for path in (root / "csrc").rglob("*") if path.is_file())]
    names = sorted(path.relative_to(root).as_posix() for path in files)
    return hashlib.sha256(b"".join(name.encode() + (root / name).read_bytes() for name in names)).hexdigest()
