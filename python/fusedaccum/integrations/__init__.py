"""What a framework needs beyond an :class:`fusedaccum.AccumulatingOptimizer` in its optimizer's place; one module a framework.

Imported by nothing else in the package, so that no framework has to be installed.
"""
