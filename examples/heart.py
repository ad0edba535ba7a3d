"""Heart disease, one client per hospital: logistic regression that no hospital could fit alone.

    aqg run --problem examples/heart.py:problem --data-dir DIR

Data: the UCI heart disease sets of Cleveland, Budapest, Zurich and Long Beach (920 patients, CC BY
4.0), https://archive.ics.uci.edu/dataset/45/heart+disease. Put ``processed.cleveland.data``,
``processed.hungarian.data``, ``processed.switzerland.data`` and ``processed.va.data`` into
``DIR/heart``; missing values may be written ``?`` or ``NaN``.

Every fifth patient of each hospital is in the test set. Values are scaled by the mean and the
deviation over all training patients, which hospitals can compute together from sums; a missing
value becomes the mean, and a column beside it says that it was missing.

The problem itself is in ``aqg/studies/contest/natural.py``; here are settings of its own.
"""

from __future__ import annotations

from aqg.studies.contest.natural import heart as problem  # noqa: F401

SETTINGS = {"rounds": 300, "alpha": 0.1, "dtype": "float64", "recipe": "auto,gd,laq"}
