"""What a framework needs beyond an :class:`fusedaccum.AccumulatingOptimizer`; a module for each.

Nothing else in the package imports these, so no framework has to be installed.
"""
