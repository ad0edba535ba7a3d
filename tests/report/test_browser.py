"""The report in a real browser: everything is drawn, reacts, and stays on this machine."""

import shutil

import pytest

from aqg.report.write import write_report

from tests.commands import change_rounds

pytestmark = pytest.mark.soak

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update"
ARGUMENTS += " --disable-background-networking --disable-sync"
CURVES = tuple(
    f'.panels[data-metric="{metric}"] .plot[data-axis="{axis}"]'
    for metric in ("loss", "test_accuracy", "test_perplexity")
    for axis in ("rounds", "uploads", "bytes")
)
PLOTS = (*CURVES, "#incidents-plot .plot")


@pytest.fixture(scope="module")
def report(make_run, tmp_path_factory):
    """Return the path of a report on three recipes, two seeds each, with every kind of trouble."""
    root = tmp_path_factory.mktemp("runs")
    for recipe in ("lean", "gd", "laq"):
        for seed in (0, 1):
            make_run(root / f"{recipe}-{seed}", recipe, seed, fault="<img src=x onerror=alert(1)>")
    change_rounds(root / "lean-0", lambda row: row.update(latency=0.1 * row["round"], late=0))
    make_run(root / "qgd", "qgd", finished=False)
    page = root / "report.html"
    write_report([root], page)
    return page


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs chromium on the path")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, report):
    """Return the opened report, which keeps note of errors and of everything it asks for."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(20_000)
    page.troubles = []
    page.requests = []
    page.on("console", lambda message: page.troubles.append(message.text))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("dialog", lambda dialog: page.troubles.append(dialog.message))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    yield page
    assert page.troubles == []
    assert page.requests == [report.as_uri()]


def recipes_drawn(page, plot):
    return page.locator(f"{plot} .series").evaluate_all(
        "nodes => [...new Set(nodes.filter(node => node.querySelector('.line'))"
        ".map(node => node.dataset.recipe))].sort()"
    )


def chip(page, name):
    return page.locator("#legend .chip", has_text=name).first


def test_every_plot_and_table_is_drawn(page):
    assert page.locator(".plot svg").count() == len(PLOTS) + 8 + 3
    for plot in CURVES:
        assert recipes_drawn(page, plot) == ["0", "1", "2", "3"], plot
        assert page.locator(f"{plot} .band").count() == 3, plot  # all but the run without company
    assert recipes_drawn(page, PLOTS[-1]) == ["2"]
    assert page.locator(".stack-plot .stack").count() >= 4
    for canvas in page.locator(".heat-plot canvas").all():
        colors = canvas.evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
            ".data.buffer)).size"
        )
        assert colors >= 4  # silent, away, and two widths at least
    assert page.locator("#results-table tbody tr").count() == 4
    assert page.locator("#faults-table tbody tr").count() == 6
    assert page.locator(".heat-plot .fault").count() >= 1
    assert "not finished" in page.locator("#results-table").inner_text()
    assert "late" in page.locator("#incidents-note").inner_text()
    assert page.locator("#versions").inner_text().startswith("this report")


def test_cost_and_delay_have_a_point_for_each_recipe_that_gets_there(page):
    panels = page.locator("#frontier figure")
    assert panels.count() == 3  # the loss and two metrics
    assert "within 0.5 of its minimum" in panels.first.inner_text()
    first = page.locator(".frontier-plot").first
    assert first.locator("circle").count() == 4
    assert first.locator("path.frontier").get_attribute("d").startswith("M")
    first.evaluate("node => node.scrollIntoView({ block: 'center' })")
    first.locator("circle").last.hover()
    told = page.locator("#tooltip").inner_text()
    assert "rounds" in told
    assert "bytes uploaded and downloaded" in told
    chip(page, "laq").click()
    assert first.locator("circle").count() == 3
    page.wait_for_timeout(600)
    chip(page, "laq").click()
    page.mouse.move(1, 1)


def test_text_from_runs_is_shown_as_text(page):
    assert "<img src=x" in page.locator("#faults-table").inner_text()
    assert page.locator("#faults-table img").count() == 0


def test_toggling_a_recipe_hides_it_in_all_plots(page):
    everywhere = {plot: recipes_drawn(page, plot) for plot in PLOTS}
    index = chip(page, "lean").get_attribute("data-recipe")
    chip(page, "lean").click()
    assert chip(page, "lean").get_attribute("aria-pressed") == "false"
    for plot in PLOTS:
        assert recipes_drawn(page, plot) == [r for r in everywhere[plot] if r != index], plot
    columns = page.locator("#activity-columns figure")
    shown = columns.evaluate_all("f => f.map(n => n.dataset.recipe)")
    assert index not in shown
    assert page.locator("#activity-columns option", has_text="lean").count() == 0
    assert page.locator("#results-table tr.off").count() == 1
    page.wait_for_timeout(600)  # a second click sooner would be a double-click
    chip(page, "lean").click()
    for plot in PLOTS:
        assert recipes_drawn(page, plot) == everywhere[plot], plot
    chip(page, "laq").dblclick()
    assert len(recipes_drawn(page, PLOTS[0])) == 1
    page.wait_for_timeout(600)
    chip(page, "laq").dblclick()
    assert recipes_drawn(page, PLOTS[0]) == everywhere[PLOTS[0]]


def test_hovering_tells_values_and_dragging_zooms(page):
    plot = page.locator(PLOTS[2])
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "bytes uploaded and downloaded" in page.locator("#tooltip").inner_text()
    assert page.locator("#tooltip div").count() >= 3
    before = plot.inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 2 + 50)
    page.mouse.up()
    assert plot.inner_text() != before
    plot.dblclick()
    assert plot.inner_text() == before
    heat = page.locator(".heat-plot").first
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.locator("#tooltip b").inner_text().startswith("client ")
    bars = page.locator('.bytes-plot[data-direction="upload"]').first
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = page.locator("#tooltip").inner_text()
    assert all(word in told for word in ("client ", "uploaded", "downloaded", "total"))
    page.mouse.move(1, 1)
    assert page.locator("#tooltip").is_hidden()


def test_a_bar_for_what_each_client_sent_and_received(page):
    for direction in ("upload", "download"):
        plots = page.locator(f'.bytes-plot[data-direction="{direction}"]')
        assert plots.count() == 2
        assert plots.first.locator(".bar").count() == 10
    headings = page.locator("#results-table thead").inner_text()
    assert all(word in headings for word in ("uploaded", "downloaded", "total to target"))


def test_controls_sorting_and_theme(page):
    path = page.locator(f"{PLOTS[0]} .line").first
    before = path.get_attribute("d")
    caption = page.locator('.panels[data-metric="loss"] figcaption').last
    assert caption.inner_text() == "against bytes uploaded and downloaded"
    curve = page.locator(f"{PLOTS[2]} .line").first
    total = curve.get_attribute("d")
    page.locator('[data-control="bytes"] [data-value="upload_bytes"]').click()
    assert caption.inner_text() == "against bytes uploaded"
    assert curve.get_attribute("d") != total
    for control, value in (("metric", "loss"), ("losses", "linear"), ("rounds", "log")):
        page.locator(f'[data-control="{control}"] [data-value="{value}"]').click()
        after = path.get_attribute("d")
        assert after != before, control
        before = after
    heading = page.locator("#results-table th button", has_text="uploads")
    column = (
        "t => [...t.tBodies[0].rows].map(r => parseFloat(r.cells[4].innerText.replace(',', '')))"
    )
    heading.click()
    ascending = page.locator("#results-table").evaluate(column)
    assert ascending == sorted(ascending)
    heading.click()
    assert page.locator("#results-table").evaluate(column) == sorted(ascending, reverse=True)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != light
