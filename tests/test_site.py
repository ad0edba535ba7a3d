"""The documentation site: it builds without a warning, and takes nothing from the network."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import run

ROOT = Path(__file__).parents[1]

_LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?P<src>[^\s\">]+)"
    r"|<link(?P<link>[^>]*)>"
    r"|url\((?P<url>[^)]+)\)"
    r"|@import\s+[\"'](?P<imported>[^\"']+)"
)
_HREF = re.compile(r"\shref=\"?([^\s\">]+)")


def loaded_from(text):
    """Yield what a browser fetches to show a page or a stylesheet."""
    for match in _LOADED.finditer(text):
        if match["link"] is None:
            yield match["src"] or match["url"] or match["imported"]
        elif re.search(r"rel=\"?(stylesheet|icon|preload|preconnect|dns-prefetch)", match["link"]):
            yield from _HREF.findall(match["link"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if find_spec("zensical") is None or find_spec("mkdocstrings") is None:
        pytest.skip("needs the site generator: pip install 'aqg[docs]'")
    place = tmp_path_factory.mktemp("site") / "site"
    run(sys.executable, str(ROOT / "tools" / "site.py"), str(place))
    return place


@pytest.mark.soak
def test_every_page_is_built(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


@pytest.mark.soak
def test_nothing_is_fetched_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert files
    for file in files:
        for target in loaded_from(file.read_text(encoding="utf-8")):
            address = target.strip("\"'")
            assert not re.match(r"(https?:)?//", address), f"{file.relative_to(site)}: {address}"


@pytest.mark.soak
def test_pictures_are_in_the_site(site):
    for page in site.rglob("*.html"):
        for source in re.findall(r"<img[^>]*\ssrc=\"?([^\s\">]+)", page.read_text("utf-8")):
            assert (page.parent / source).exists() or source.startswith("data:"), (page, source)


@pytest.mark.soak
def test_the_public_names_are_in_the_reference(site):
    import aqg.flower

    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for module in (aqg, aqg.sim, aqg.protocol, aqg.flower):
        for name in set(module.__all__) - {"__version__"}:
            assert re.search(rf'id="?{module.__name__}.{name}\b', text), name


def test_what_a_page_loads_is_found():
    page = '<script src="https://x.org/a.js"></script><link rel="stylesheet" href="//x.org/b.css">'
    assert list(loaded_from(page)) == ["https://x.org/a.js", "//x.org/b.css"]
    page = '<a href="https://x.org">x</a><link rel="canonical" href="https://y">'
    assert not list(loaded_from(page))
