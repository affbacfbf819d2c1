"""Features beside the core, one file each, which the core knows by no name but :class:`fusedaccum.core.extension.Extension`."""
