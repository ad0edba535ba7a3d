"""Write the tables and passages of documents anew, from the results in a directory.

python -m aqg.studies.paper.markdown results/paper.md docs/explanation/reproduction.md results
"""

from __future__ import annotations

import sys
from pathlib import Path

from aqg.studies.document import refresh
from aqg.studies.paper.outcomes import read_results
from aqg.studies.paper.passages import all_passages
from aqg.studies.paper.tables import all_tables


def main(arguments: list[str]) -> None:
    """Refresh the documents named first from the results named last."""
    *documents, directory = map(Path, arguments)
    results = read_results(directory)
    tables, passages = all_tables(results), all_passages(results)
    for document in documents:
        text = refresh(document.read_text(encoding="utf-8"), tables, passages)
        document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
