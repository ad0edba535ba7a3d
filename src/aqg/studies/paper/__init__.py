"""The paper run again: its plan, its Table 2 beside ours, its figures.

What the results say of the paper's claims is written outside of the package, in ``papers/``.
"""
