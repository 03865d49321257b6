"""The page of the service in a real browser: what a user does and sees."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.paths import DATA
from tests.helpers.service import server as servers
from tests.helpers.service.server import HARD, Server, chain, finished
from torch import nn

import remat

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.helpers.training.models import WithParts

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = '"><img src=x onerror="window.hit=1"><script>window.hit=1</script>'

pytestmark = [
    pytest.mark.repo,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed; on Debian: apt-get install chromium"
    ),
]
expect.set_options(timeout=60_000)  # machines that run tests are busy


class Tiny(WithParts, layers=lambda: nn.ModuleList(nn.Linear(16, 16) for _ in range(6))):
    """A few layers, whose activations take most of the memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


@pytest.fixture(scope="module")
def trace() -> remat.Trace:
    traced = remat.trace(Tiny(), (torch.randn(512, 16),))
    return remat.measure(traced, device=remat.Roofline("h200"))


@pytest.fixture(scope="module")
def trace_file(trace: remat.Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "tiny.json.gz"
    trace.save(path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that must have no errors: none in the console, and no violation of the policy.

    The browser itself writes a line for each refused request; that is no error of the page.
    """
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    page = context.new_page()
    problems: list[str] = []

    def hear(kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            problems.append(text)

    page.on("console", lambda message: hear(message.type, message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.add_init_script(
        "window.violations = [];"
        "addEventListener('securitypolicyviolation',"
        " (event) => window.violations.push(event.violatedDirective + event.blockedURI))"
    )
    yield page
    assert problems == []
    assert page.evaluate("window.violations") == []
    assert page.evaluate("window.hit") is None
    context.close()


def choose(page: Page, server: Server, path: Path) -> None:
    page.goto(server.url)
    page.get_by_label("Trace or graph").set_input_files(path)
    expect(page.locator("#file-facts")).to_contain_text("operation")


def solve(page: Page, server: Server, path: Path, budget: str) -> None:
    choose(page, server, path)
    page.get_by_label("Memory budget", exact=True).fill(budget)
    page.get_by_role("button", name="Solve").click()


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def figure(page: Page, name: str) -> str:
    return page.locator("dl.figures div", has_text=name).locator("dd").first.inner_text()


def wait_until(page: Page, condition: str) -> None:
    """Wait until JavaScript is true. It is evaluated from outside: `wait_for_function` polls by
    eval inside of the page, which the policy refuses from the second poll on."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"this did not become true in a minute: {condition}")


def expect_pictures(page: Page, count: int) -> None:
    """Wait until this many pictures are loaded and can be drawn."""
    script = "[...document.images].filter((i) => i.naturalWidth > 100).length"
    wait_until(page, f"{script} >= {count}")
    assert page.evaluate(script) == count


# -- solve -------------------------------------------------------------------------------------


def test_a_trace_is_solved_and_its_result_is_shown(
    page: Page, server: Server, trace_file: Path
) -> None:
    solve(page, server, trace_file, "60%")
    expect(page.locator(".state")).to_contain_text("Succeeded")
    expect(page.get_by_role("heading", name="Tiny")).to_be_focused()
    expect(page.get_by_role("img", name="Memory over the step")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Schedule"))).to_be_visible()
    expect(page.get_by_role("img", name="Recomputed time by module")).to_be_visible()
    expect_pictures(page, 3)
    with server.http() as http:
        id = page.url.rpartition("/")[2]
        plan = http.get(f"/jobs/{id}").json()["summary"][0]
    assert figure(page, "Overhead") == f"+{plan['overhead']:.2%}"
    assert figure(page, "Peak memory").endswith("KiB")
    expect(page.locator(".verdict")).to_contain_text("Proved within the requested gap")
    table = page.get_by_role("region", name="Most expensive recomputations")
    expect(table).to_contain_text("layers.")
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("row", name="Tiny").first).to_contain_text("succeeded")


def test_a_trace_is_solved_in_pieces_with_offloaded_tensors(
    page: Page, server: Server, trace_file: Path
) -> None:
    choose(page, server, trace_file)
    page.get_by_label("Split large operations").select_option("4")
    page.get_by_label("Offload to the host").select_option("auto")
    page.get_by_role("button", name="Solve").click()
    expect(page.locator("#submit-problem")).to_contain_text("need costs, too")
    page.get_by_label("Costs of the operations").select_option("roofline:h200")
    page.get_by_role("button", name="Solve").click()
    expect(page.locator(".state")).to_contain_text("Succeeded")


@pytest.mark.slow
def test_the_library_reads_the_downloaded_files(
    page: Page, server: Server, trace_file: Path, tmp_path: Path
) -> None:
    solve(page, server, trace_file, "70%")
    section = page.get_by_role("region", name="Downloads")

    def fetched(name: str) -> Path:
        with page.expect_download() as download:
            section.get_by_role("button", name=name, exact=True).click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        return path

    assert remat.Program.load(fetched("Program")).to_json()
    plan = remat.Plan.load(fetched("Plan"))
    assert plan.peak_bytes <= plan.budget_bytes
    assert json.loads(fetched("Chrome trace").read_text())
    assert "def forward" in fetched("Python").read_text()
    assert fetched("Memory picture").read_text().startswith("<svg")
    assert fetched("Schedule picture").read_text().startswith("<svg")
    assert "html" in fetched("Page").read_text()[:30]
    assert json.loads(fetched("Complete answer").read_text())["costs"] == "roofline h200"


@pytest.mark.slow
def test_an_infeasible_budget_shows_the_smallest_feasible_one(
    page: Page, server: Server, trace_file: Path
) -> None:
    solve(page, server, trace_file, "1kB")
    expect(page.locator(".state")).to_contain_text("Infeasible")
    expect(page.locator("section.infeasible")).to_contain_text("1,000 bytes")
    with server.http() as http:
        id = page.url.rpartition("/")[2]
        least = http.get(f"/jobs/{id}").json()["problem"]["min_feasible_bytes"]
    expect(page.locator("section.infeasible")).to_contain_text(f"{least:,} bytes")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_label("Memory budget", exact=True)).to_have_value(str(least))
    page.get_by_role("button", name="Solve").click()
    expect(page.locator(".state")).to_contain_text("Succeeded")


@pytest.mark.slow
def test_a_bare_graph_and_a_sweep_are_solved(page: Page, server: Server, tmp_path: Path) -> None:
    choose(page, server, write(tmp_path / "graph.json", chain(10)))
    expect(page.get_by_label("Costs of the operations")).to_be_disabled()
    page.get_by_label("The frontier").check()
    page.get_by_label("Memory budgets").fill("60%, 80%, 100%")
    page.get_by_role("button", name="Sweep").click()
    expect(page.get_by_role("img", name="Extra time")).to_be_visible()
    expect(page.locator("#job tbody tr")).to_have_count(3)
    expect(page.locator("#job tbody tr").last).to_contain_text("100.0%")
    expect_pictures(page, 1)


@pytest.mark.slow
def test_a_training_loop_fits_a_gpu_or_has_options(
    page: Page, server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "h100.json.gz"
    remat.trace(Tiny(), (torch.randn(65536, 16),), device="h100").save(path)
    choose(page, server, path)
    page.get_by_label("Will it fit?").check()
    expect(page.get_by_label("Memory budget", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".verdict")).to_contain_text("Yes: ")
    expect(page.get_by_role("region", name="The peak")).to_contain_text("activations")
    page.get_by_role("link", name="All jobs").click()
    page.get_by_label("Optimizer", exact=True).select_option("sgd")
    page.get_by_label("Usable memory, GiB").fill("0.1")
    page.get_by_role("button", name="Predict").click()
    expect(page.locator(".verdict")).to_contain_text("No: ")
    options = page.get_by_role("region", name="What makes it fit")
    expect(options).to_contain_text("remat.enable(model, ")
    expect(page.get_by_role("button", name="Complete answer")).to_be_visible()


@pytest.mark.slow
def test_a_memory_snapshot_is_explained(page: Page, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    content = (DATA / "snapshots" / "python-writer.pickle.gz").read_bytes()
    path.write_bytes(gzip.decompress(content))
    page.goto(server.url)
    page.get_by_label("Trace or graph").set_input_files(path)
    expect(page.get_by_label("Why did the memory run out?")).to_be_checked()
    expect(page.get_by_label("Memory budget", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Explain").click()
    expect(page.locator(".verdict")).to_contain_text("leak: tensors kept: ")
    expect(page.get_by_role("region", name="Live memory")).to_contain_text("optimizer state")
    expect(page.get_by_role("heading", level=1)).to_have_text("memory snapshot")
    expect(page.get_by_role("button", name="Page")).to_be_visible()


@pytest.mark.slow
def test_check_only_shows_the_sizes(page: Page, server: Server, trace_file: Path) -> None:
    choose(page, server, trace_file)
    page.get_by_label("Costs of the operations").select_option("roofline:a100")
    page.get_by_role("button", name="Check only").click()
    expect(page.locator("#submit-note")).to_contain_text("peak without recomputation")
    assert page.url.rstrip("#/") == server.url


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.quick_cases("\\xff\\xfe\\x00-not text")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"nodes": [', "is not JSON"),
        (gzip.compress(b'{"nodes": []}', mtime=0)[:-9], "incomplete or damaged"),
        (b"PK\x03\x04rest", "an archive"),
        (b"\xff\xfe\x00", "not text"),
        (b'{"format": "remat.plan"}', "a plan"),
        (b"[1, 2]", "neither a trace nor a graph"),
    ],
)
def test_a_broken_file_is_reported_next_to_its_field(
    page: Page, server: Server, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    page.goto(server.url)
    page.get_by_label("Trace or graph").set_input_files(path)
    expect(page.locator("#file-problem")).to_contain_text(words)
    page.get_by_role("button", name="Solve").click()
    expect(page.locator("#submit-problem")).to_contain_text("Choose a trace or a graph first")
    expect(page.get_by_label("Trace or graph")).to_be_focused()


@pytest.mark.slow
def test_refusals_of_the_service_are_shown_next_to_their_field(
    page: Page, server: Server, trace_file: Path, tmp_path: Path
) -> None:
    solve(page, server, trace_file, "8 gigs")
    problem = page.locator("#submit-problem")
    expect(problem).to_contain_text("unknown unit 'gigs'")
    page.get_by_label("Memory budget", exact=True).fill("60%")
    page.get_by_label("Gap").fill("much")
    page.get_by_role("button", name="Solve").click()
    expect(problem).to_contain_text("The gap is a percentage")
    expect(page.get_by_label("Gap")).to_be_focused()
    forged = json.loads(gzip.decompress(trace_file.read_bytes()))
    forged["nodes"][0]["target"] = "os.system"
    solve(page, server, write(tmp_path / "forged.json", forged), "60%")
    expect(problem).to_contain_text("os.system")


@pytest.mark.slow
def test_a_missing_job_is_reported(page: Page, server: Server) -> None:
    page.goto(f"{server.url}/#/jobs/0123456789abcdef")
    expect(page.get_by_role("alert").filter(has_text="you have no job")).to_be_visible()
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", name="Solve a training step")).to_be_visible()


@pytest.mark.slow
def test_names_are_shown_as_text(
    page: Page, server: Server, trace_file: Path, tmp_path: Path
) -> None:
    graph: dict[str, Any] = chain(10)
    for number, operation in enumerate(graph["operations"]):
        operation["name"] = operation["module"] = f"{EVIL}{number}"
    solve(page, server, write(tmp_path / "evil.json", graph), "50%")
    expect(page.get_by_role("region", name="Most expensive recomputations")).to_contain_text(EVIL)
    expect(page.get_by_role("img", name=re.compile("^Schedule"))).to_be_visible()
    expect_pictures(page, 3)
    trace = json.loads(gzip.decompress(trace_file.read_bytes())) | {"model": EVIL}
    path = tmp_path / f"{EVIL.replace('/', '')}.json"
    solve(page, server, write(path, trace), "75%")
    expect(page.get_by_role("heading", name=EVIL)).to_be_visible()
    expect(page.locator(".state")).to_contain_text("Succeeded")
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("link", name=EVIL).first).to_be_visible()
    assert page.locator("main img, main script").count() == 0


# -- the queue and running jobs ----------------------------------------------------------------


@pytest.mark.slow
def test_a_running_job_can_be_followed_and_cancelled(page: Page, server: Server) -> None:
    with server.http() as http:
        body = {"graph": chain(100), "budget": "30%", "options": {"strategy": HARD}}
        job = http.post("/solve", json=body).json()
        page.goto(f"{server.url}/#/jobs/{job['id']}")
        expect(page.locator(".state")).to_contain_text("Running for")
        expect(page.locator(".figures")).to_contain_text("so far")
        expect(page.locator("svg.chart .incumbent").first).to_be_attached()
        page.get_by_role("button", name="Cancel").click()
        dialog = page.get_by_role("dialog", name="Cancel this job?")
        expect(dialog.get_by_role("button", name="Go back")).to_be_focused()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert http.get(f"/jobs/{job['id']}").json()["status"] == "running"
        page.get_by_role("button", name="Cancel").click()
        dialog.get_by_role("button", name="Cancel it").click()
        expect(page.locator(".state")).to_contain_text("Cancelled, after")
        assert http.get(f"/jobs/{job['id']}").json()["status"] == "cancelled"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("heading", name="Your jobs")).to_be_visible()
    expect(page.locator(f"a[href='#/jobs/{job['id']}']")).to_have_count(0)


@pytest.mark.slow
def test_the_queue_updates_and_has_pages(page: Page, tmp_path: Path, browser: Browser) -> None:
    with servers.running(tmp_path / "data", "--workers", "1") as server, server.http() as http:
        page.goto(server.url)
        expect(page.get_by_text("There are no jobs yet.")).to_be_visible()
        hard = {"graph": chain(100), "budget": "30%", "options": {"strategy": HARD}}
        first = http.post("/solve", json=hard).json()["id"]
        others = [
            http.post("/solve", json={"graph": chain(3), "budget": 900 + n}).json()["id"]
            for n in range(21)
        ]
        page.reload()
        rows = page.locator("#queue tbody tr")
        expect(rows).to_have_count(20)
        expect(rows.first).to_contain_text("queued, 20 before it")
        page.get_by_role("button", name="Older").click()
        expect(rows).to_have_count(2)
        expect(rows.last).to_contain_text("running")
        expect(rows.last).to_contain_text("so far")
        rows.last.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel it").click()
        expect(rows.last).to_contain_text("cancelled")
        assert http.get(f"/jobs/{first}").json()["status"] == "cancelled"
        for id in others:
            finished(http, id)
        expect(rows.first).to_contain_text("succeeded")
        rows.last.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Delete it").click()
        expect(rows).to_have_count(1)
        page.get_by_role("button", name="Newer").click()
        expect(rows).to_have_count(20)


# -- access ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_can_be_used_by_keyboard_alone(
    page: Page, server: Server, trace_file: Path
) -> None:
    page.on("filechooser", lambda chooser: None)  # including the first one
    page.goto(server.url)
    expect(page.locator("#queue tbody tr, #queue-empty:visible").first).to_be_visible()

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            active_element = "document.activeElement"
            focused = page.evaluate(f"{active_element}.id || {active_element}.textContent")
            if focused == name:
                width = page.evaluate(f"getComputedStyle({active_element}).outlineWidth")
                assert width == "3px", "the focus can be seen"
                return
        raise AssertionError(f"{name} cannot be reached by Tab")

    tab_to("file")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(trace_file)
    expect(page.locator("#file-facts")).to_contain_text("Tiny")
    tab_to("budget")
    page.keyboard.type("65%")
    tab_to("send")
    page.keyboard.press("Enter")
    expect(page.locator(".state")).to_contain_text("Succeeded")
    expect(page.get_by_role("heading", name="Tiny")).to_be_focused()
    tab_to("Delete")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Delete this job?")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Delete")).to_be_focused()


@pytest.mark.slow
def test_a_key_is_requested_and_remembered(page: Page, tmp_path: Path, trace_file: Path) -> None:
    with servers.running(tmp_path / "data") as server:
        command = [sys.executable, "-m", "remat.cli", "keys", "add", "ada"]
        completed = subprocess.run(command, env=server.environment, capture_output=True, check=True)
        key = completed.stdout.decode().strip()
        with server.http() as http:
            http.get("/jobs")  # the service notices the new key within a second
        page.wait_for_timeout(1100)
        page.goto(server.url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("this service needs an API key")
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#queue-problem")).to_contain_text("needs an API key")
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill("remat_wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("does not accept this key")
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("There are no jobs yet.")).to_be_visible()
        solve(page, server, trace_file, "60%")
        expect(page.get_by_role("img", name="Memory over the step")).to_be_visible()
        page.reload()
        expect(page.get_by_role("img", name="Memory over the step")).to_be_visible()
        assert page.evaluate("Object.keys(localStorage).length") == 0
        assert key not in page.url
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Delete the key").click()
        wait_until(page, "Object.keys(sessionStorage).length === 0")


@pytest.mark.slow_cases("dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(page: Page, server: Server, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    colours: dict[str, str] = page.evaluate(
        "Object.fromEntries(['paper', 'raised', 'text', 'soft', 'blue', 'on-blue', 'red', 'edge']"
        ".map((name) => [name, getComputedStyle(document.documentElement)"
        ".getPropertyValue('--' + name).trim()]))"
    )
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert body == ("rgb(22, 24, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
    for paper in ("paper", "raised"):
        for ink in ("text", "soft", "blue"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
        for line in ("edge", "red"):
            assert contrast(colours[line], colours[paper]) >= 3, (line, paper)
    assert contrast(colours["on-blue"], colours["blue"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2 of two colours such as "#1a1a1a"."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_a_narrow_screen_does_not_scroll_sideways(
    page: Page, server: Server, trace_file: Path
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    solve(page, server, trace_file, "55%")
    expect(page.get_by_role("img", name="Memory over the step")).to_be_visible()
    expect(page.get_by_role("region", name="Most expensive recomputations")).to_be_visible()
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 360
    page.get_by_role("link", name="All jobs").click()
    expect(page.locator("#queue tbody tr").first).to_be_visible()
    assert page.evaluate(width) <= 360


@pytest.mark.slow
def test_the_page_loads_nothing_from_other_sites(page: Page, server: Server) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(server.url)
    expect(page.locator("#submit")).to_be_visible()
    assert all(url.startswith(server.url) for url in urls)
    with server.http() as http:
        answer = http.get("/")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert " style=" not in answer.text
        assert answer.headers["cache-control"] == "no-cache"
        assert http.get("/static/app.js").headers["cache-control"] == "no-cache"
