"""The paper's convergence theory as running checks, for ``f = Σ_m w_m f_m``.

The server's step is ``θ ← θ - α Σ_m w_m ref_m``, a sum, so the function that theory is about is
the *sum* of the clients' losses. Losses that the simulator reports are its mean, ``f/M``;
everything in this package that is called ``L``, ``μ`` or ``V`` belongs to the sum.
"""
