"""What a framework needs beyond an :class:`fusedaccum.AccumulatingOptimizer` in its optimizer's place; one module per framework.

Nothing else in the package imports these, so no framework has to be installed.
"""
