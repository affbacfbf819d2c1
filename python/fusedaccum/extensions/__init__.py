"""Features, one file each. The core knows only :class:`fusedaccum.core.extension.Extension`."""
