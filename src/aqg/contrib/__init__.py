"""Useful, and not core: what nothing else needs in order to work.

============== =================================================================================
`cuda`         rounds as CUDA graphs, for ``--device cuda``
`ray_cluster`  a study's runs on a Ray cluster, for ``--cluster ADDRESS``
`theory`       the paper's lemmas and theorem as checks, and `advice` for ``aqg theory``
============== =================================================================================

The promise is smaller than elsewhere in the package. Each part gives the numbers of the plain way,
and a test holds it to that where its hardware or library is there; tests that need a GPU are
skipped without one, so a release may not have been tried on yours. Speed is not promised, names may
change in any release, and a part that stands in the way of the core goes. The core asks for these
modules when a user does, and never imports them otherwise.
"""
