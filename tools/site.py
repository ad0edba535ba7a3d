"""Build the documentation site, strictly: ``python tools/site.py [DIRECTORY]``, site/ by default.

The site holds ``docs/`` only. On GitHub and on disk a link such as ``../../results/runs.csv`` leads
to the file; here its text stays, with the path from the root of the repository behind it, and a
picture is copied. Zensical checks links between pages; paths out of ``docs/`` are checked here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


def without_outside_links(page: Path, pictures: Path) -> str:
    """Return a page's text with the links that leave ``docs/`` written as paths.

    Pictures are copied to a directory, which is to be ``images`` of the site.
    """
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)

    def rewrite(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match["target"]))
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            sys.exit(f"{page.relative_to(ROOT)}: {match['target']} does not exist")
        path = target.relative_to(ROOT).as_posix()
        if match["mark"]:
            name = path.replace("/", "-")
            shutil.copy(target, pictures / name)
            return f"![{match['text']}]({up}images/{name})"
        is_path = match["text"].strip("`") == path
        return f"`{path}`" if is_path else f"{match['text']} (`{path}`)"

    return _LINK.sub(rewrite, page.read_text(encoding="utf-8"))


def build(site: Path) -> int:
    """Build the site into an empty or new directory and return the generator's exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        shutil.copytree(DOCS, work / "docs")
        for page in DOCS.rglob("*.md"):
            copy = work / "docs" / page.relative_to(DOCS)
            copy.write_text(without_outside_links(page, work / "docs" / "images"), encoding="utf-8")
        for name in ("src", "tools"):
            (work / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "mkdocs.yml", work)
        command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
        code = subprocess.run(command, cwd=work, check=False).returncode
        if code == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(work / "site", site)
    return code


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
