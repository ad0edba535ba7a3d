"""Useful, and not core: what nothing else needs in order to work.

============== =================================================================================
`cuda`         rounds as CUDA graphs, for ``--device cuda``
`ray_cluster`  a study's runs on a Ray cluster, for ``--cluster ADDRESS``
`theory`       the paper's lemmas and theorem as checks, and in words for ``aqg theory``
============== =================================================================================

The promise is smaller than elsewhere. Each part gives the numbers of the plain way, and a test
holds it to that where its hardware or library is there. Speed is not promised, names may change in
any release, and the core imports these modules only when a user asks for them.
"""
